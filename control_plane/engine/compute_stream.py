"""One Execute stream, and the mailbox in which its replies wait for the engine thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import grpc

from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc


class Arrival(NamedTuple):
    """What a stream brought: a reply, or how it ended (None: by itself).

    `at_s`: when, on the clock of `time.monotonic`.
    """

    stream: ExecuteStream
    reply: compute_pb2.ExecutionOutput | grpc.RpcError | None
    at_s: float


class Mailbox:
    """What the engine thread waits on: arrivals, and interrupts."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._is_interrupted = False

    def put(self, arrival: Arrival) -> None:
        """Add an arrival; any thread."""
        self._items.put(arrival)

    def interrupt(self) -> None:
        """Make a `get` under way, or else the next one, return at once; any thread."""
        # Many interrupts before one `get` need one item. The flag falls before `get` returns, so
        # an interrupt that finds it up is still ahead of that return.
        if not self._is_interrupted:
            self._is_interrupted = True
            self._items.put(None)

    def get(self, timeout_s: float | None) -> Arrival | None:
        """Wait for the next arrival; None after an interrupt. Raises queue.Empty in time."""
        item = self._items.get(timeout=timeout_s)
        if item is None:
            self._is_interrupted = False
        return item


class ExecuteStream:
    """A stream on its own: batches go in without waiting, replies end up in the mailbox.

    A thread moves them there, because a plain read of the stream could neither time out nor be
    woken by a new request.
    """

    def __init__(
        self,
        stub: compute_pb2_grpc.ComputeServiceStub,
        batches: Iterable[compute_pb2.ExecutionBatch],
        mailbox: Mailbox,
    ) -> None:
        self._requests: queue.SimpleQueue[compute_pb2.ExecutionBatch | None] = queue.SimpleQueue()
        for batch in batches:
            self._requests.put(batch)
        self._mailbox = mailbox
        self.call: grpc.CallIterator[compute_pb2.ExecutionOutput] = stub.Execute(
            iter(self._requests.get, None)
        )
        threading.Thread(target=self._read_replies, name="compute-replies", daemon=True).start()

    def send(self, batch: compute_pb2.ExecutionBatch) -> None:
        """Send a batch after those before it; does not wait."""
        self._requests.put(batch)

    def cancel(self) -> None:
        """End the stream."""
        self._requests.put(None)
        self.call.cancel()  # type: ignore[no-untyped-call] # grpc-stubs leave it bare

    def _read_replies(self) -> None:
        """Move the replies into the mailbox, and then how the stream ended."""
        ended: grpc.RpcError | None = None
        try:
            for reply in self.call:
                self._mailbox.put(Arrival(self, reply, time.monotonic()))
        except grpc.RpcError as error:
            ended = error
        self._requests.put(None)  # lets gRPC's sending thread end
        self._mailbox.put(Arrival(self, ended, time.monotonic()))
