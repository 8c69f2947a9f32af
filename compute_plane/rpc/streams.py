"""One Execute stream: batches to the device thread, replies back in step order.

    gRPC ──▶ reader thread ──▶ device queue ──▶ device thread ──▶ outbox ──▶ RPC thread ──▶ gRPC

At most `max_in_flight` batches, as Describe says, are between the two gRPC ends; the reader does
not read on while that many are, so a controller that sends faster is held back by flow control.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

import grpc
import structlog

from compute_plane.errors import PlaneBroken
from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.step import StepReply
from compute_plane.executor.work import Answer
from compute_plane.rpc.convert import batch_from_proto, header_from_proto
from planes.errors import EngineError
from protos.hetero.compute.v1 import compute_pb2

END_GRACE_S: Final = 1.0
"""What a controller gets to read its last replies and why the stream was ended."""

log = structlog.get_logger()


class ExecuteStream:
    """The stream of one controller.

    `requests` is gRPC's iterator of batches. `cut_off` ends the call at once; from any thread.
    `max_in_flight`: batches between both ends.
    """

    def __init__(
        self,
        requests: Iterator[compute_pb2.ExecutionBatch],
        device: DeviceThread,
        sessions: SessionLedger,
        cut_off: Callable[[], object],
        max_in_flight: int,
    ) -> None:
        self._requests = requests
        self._device = device
        self._sessions = sessions
        self._outbox: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._max_in_flight = max_in_flight
        self._room = threading.Semaphore(max_in_flight)
        self._has_ended = threading.Event()
        self._cut_off = cut_off
        self._is_over = threading.Event()

    def end(self, reason: EngineError | None = None) -> None:
        """End the stream, with an error or as if the controller had left; from any thread.

        Batches already handed to the device thread are not called back: those of a session that is
        no longer the current one are refused when their turn comes. A controller that does not read
        cannot be told the reason: its call is cut off after `END_GRACE_S`, so that it does not hold
        one of the few streams for ever.
        """
        self._has_ended.set()
        self._outbox.put(reason)
        if reason is not None:
            threading.Thread(target=self._cut_off_if_stuck, name="execute-end", daemon=True).start()

    def replies(self) -> Iterator[StepReply]:
        """Yield the replies until the controller has sent its last batch and got its last reply.

        Raises EngineError if the stream was ended with one.
        """
        self._sessions.expect(self)
        threading.Thread(target=self._read, name="execute-reader", daemon=True).start()
        try:
            while (answer := self._outbox.get()) is not None:
                if isinstance(answer, EngineError):
                    raise answer
                yield answer
                self._room.release()
        finally:
            self._has_ended.set()
            self._is_over.set()
            self._room.release(self._max_in_flight)  # the reader may wait for it
            self._sessions.detach(self)

    def _cut_off_if_stuck(self) -> None:
        if not self._is_over.wait(END_GRACE_S):
            self._cut_off()

    def _read(self) -> None:
        """Hand batches to the device thread; on a thread of its own."""
        try:
            self._read_batches()
        except grpc.RpcError:
            self._outbox.put(None)  # the controller is gone
        except Exception:
            # Whatever it is: the plane's own code is broken, and the stream must not hang.
            log.exception("an Execute stream failed")
            self._outbox.put(PlaneBroken("the compute plane failed; its log has the fault"))

    def _read_batches(self) -> None:
        ending: EngineError | None = None
        while True:
            self._room.acquire()
            batch = next(self._requests, None)
            if self._has_ended.is_set():
                return
            if batch is None:
                break
            header = header_from_proto(batch)
            self._sessions.attach(header.session, self)
            try:
                self._device.submit(header, batch_from_proto(batch), self._outbox.put)
            except EngineError as error:
                ending = error
                break
        for _ in range(self._max_in_flight - 1):  # until every reply is out
            self._room.acquire()
        self._outbox.put(ending)
