"""The compute plane that a recording is replayed on: a session of its own, one step at a time."""

from __future__ import annotations

import os
import queue
import socket
import time
from typing import Final

import grpc

from control_plane.engine.compute_stream import ExecuteStream, Mailbox
from control_plane.engine.link_errors import details, reason
from planes.address import Address
from planes.errors import ConfigError, ExecutionError
from planes.tls import ClientTls, open_channel
from planes.transport import PROTOCOL_VERSION, plane_channel_options
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

CALL_TIMEOUT_S: Final = 10.0
STEP_PATIENCE_S: Final = 60.0
STEP_PATIENCE_PER_TOKEN_S: Final = 0.2
"""A step is overdue after the first, plus the second for each of its tokens: long, because a replay
may well run on the slowest plane there is."""


class PlaneLostError(ExecutionError):
    """The compute plane is not there, not free, or went away."""

    reason = "PLANE_LOST"


class ReplayPlane:
    """A compute plane at an address; one session, opened anew for each one recorded.

    `takes_over`: also from a controller that is alive. `tls`: None: plaintext. Raises
    PlaneLostError from every method.
    """

    def __init__(
        self, address: Address, *, takes_over: bool = False, tls: ClientTls | None = None
    ) -> None:
        self._address = address
        self._takes_over = takes_over
        self._channel = open_channel(address, plane_channel_options(), tls)
        self._stub = compute_pb2_grpc.ComputeServiceStub(self._channel)
        self._opened = compute_pb2.OpenResponse()
        self._last_step = 0
        self._mailbox = Mailbox()
        self._stream: ExecuteStream | None = None

    def describe(self) -> compute_pb2.DescribeResponse:
        """Ask the plane what it is. Raises ConfigError for one that speaks another protocol."""
        if not self._address.may_be_served:
            raise PlaneLostError(f"the compute plane is not there: there is no {self._address}")
        try:
            described = self._stub.Describe(compute_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise PlaneLostError(
                f"the compute plane at {self._address} does not answer: {details(error)}"
            ) from None
        if described.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the compute plane at {self._address} speaks protocol version "
                f"{described.protocol_version}, this program {PROTOCOL_VERSION}",
                field="compute",
            )
        return described

    def open(self) -> None:
        """Begin a session in which no slot is known."""
        self._end_stream()
        described = self.describe()
        is_own = (
            self._opened.session > 0
            and described.epoch == self._opened.epoch
            and described.current_session == self._opened.session
        )
        request = compute_pb2.OpenRequest(
            protocol_version=PROTOCOL_VERSION,
            controller=f"replay, {socket.gethostname()}:{os.getpid()}",
            take_over=is_own or self._takes_over,
        )
        try:
            self._opened = self._stub.Open(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise PlaneLostError(_why_not_open(error, self._address)) from None
        self._last_step = self._opened.last_step
        self._stream = ExecuteStream(self._stub, (), self._mailbox)

    def run(self, batch: compute_pb2.ExecutionBatch) -> compute_pb2.ExecutionOutput:
        """Run a batch as the next step of this session, whatever session and step it names."""
        if self._stream is None:
            raise PlaneLostError(f"there is no session with the compute plane at {self._address}")
        own = compute_pb2.ExecutionBatch()
        own.CopyFrom(batch)
        own.session, own.epoch = self._opened.session, self._opened.epoch
        own.acked_step = self._last_step
        own.step_id = self._last_step = self._last_step + 1
        self._stream.send(own)
        return self._wait(self._stream, own)

    def _wait(
        self, stream: ExecuteStream, batch: compute_pb2.ExecutionBatch
    ) -> compute_pb2.ExecutionOutput:
        patience_s = STEP_PATIENCE_S + STEP_PATIENCE_PER_TOKEN_S * sum(batch.query_lens)
        until = time.monotonic() + patience_s
        while True:
            try:
                arrival = self._mailbox.get(max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise PlaneLostError(
                    f"the compute plane at {self._address} has not answered in {patience_s:g} s"
                ) from None
            if arrival is None or arrival.stream is not stream:
                continue
            output = arrival.reply
            if isinstance(output, compute_pb2.ExecutionOutput):
                break
            why = "it closed the stream" if output is None else details(output)
            raise PlaneLostError(f"the compute plane at {self._address} is lost: {why}")
        if output.step_id != batch.step_id or output.refusal.reason in (
            compute_pb2.REFUSAL_REASON_STALE_SESSION,
            compute_pb2.REFUSAL_REASON_STALE_EPOCH,
            compute_pb2.REFUSAL_REASON_STEP_GAP,
        ):
            raise PlaneLostError(
                f"the compute plane at {self._address} left the session: "
                f"{output.refusal.message or 'it answered another step'}"
            )
        return output

    def close(self) -> None:
        """End the session and the connection."""
        self._end_stream()
        self._channel.close()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


def _why_not_open(error: grpc.RpcError, address: Address) -> str:
    if reason(error) == "SESSION_HELD" and isinstance(error, grpc.Call):
        return (
            f"another controller uses the compute plane at {address} ({error.details()}): stop "
            "that one first, or take the plane away from it with --take-over"
        )
    return f"the compute plane at {address} cannot be opened: {details(error)}"
