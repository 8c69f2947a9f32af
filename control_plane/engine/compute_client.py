"""The gRPC side of the link: one compute plane, and one session with it at a time."""

from __future__ import annotations

import queue
import time

import grpc
import structlog

from control_plane.core.batch import StepBatch, StepResult
from control_plane.engine.compute_session import ComputeSession
from control_plane.engine.compute_stream import Arrival, Mailbox
from control_plane.engine.convert import (
    assets_from_proto,
    batch_to_proto,
    description_from_proto,
    result_from_proto,
)
from control_plane.engine.link_errors import no_answer, reason, why_not_open
from control_plane.engine.plane import PlaneDescription
from control_plane.engine.recording import Recorder
from control_plane.errors import FencedError, LinkError, PlaneNotThereError
from control_plane.text.assets import ModelAssets
from planes.address import Address
from planes.tls import ClientTls, open_channel
from planes.transport import PROTOCOL_VERSION, plane_channel_options
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

DESCRIBE_TIMEOUT_S = 2.0
"""The first call of every attempt. An absent plane fails it at once, a stopped one not at all."""

UNARY_TIMEOUT_S = 10.0
"""GetModelAssets and Open compute nothing; a plane that is slower has a fault."""

RESUME_PAUSE_S = 0.02
"""Between attempts to go on with a session whose stream broke."""

_log = structlog.get_logger(__name__)


class ComputeClient:
    """A compute plane at an address. See `control_plane.engine.link.ComputeLink`.

    `controller` is shown in the plane's log and to a controller that it refuses. All methods belong
    to the engine thread; `interrupt` may be called from any. `recorder`: is shown every session,
    batch and output, and may add questions of its own to a batch. `tls`: None: plaintext.
    """

    def __init__(
        self,
        address: Address,
        *,
        controller: str,
        recorder: Recorder | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._address = address
        self._controller = controller
        self._recorder = recorder
        self._described = compute_pb2.DescribeResponse()
        self._channel = open_channel(address, plane_channel_options(), tls)
        self._stub = compute_pb2_grpc.ComputeServiceStub(self._channel)
        self._mailbox = Mailbox()
        self._session: ComputeSession | None = None
        self._last_session = 0
        self._asked_session = (
            0  # ours too, if the plane did as it was asked and its answer was lost
        )
        self._plane: PlaneDescription | None = None
        self._complaint: str | None = None

    @property
    def address(self) -> Address:
        """Where the plane listens."""
        return self._address

    @property
    def epoch(self) -> int:
        """That of the plane's process as it answered last, 0 before; any thread."""
        return 0 if self._plane is None else self._plane.epoch

    def describe(self) -> PlaneDescription:
        """Ask the plane what it is; this answer is what the plane to `open` must equal.

        Raises LinkError, PlaneMismatchError.
        """
        self._plane = self._describe()
        return self._plane

    def _describe(self) -> PlaneDescription:
        if not self._address.may_be_served:
            # Not asking keeps gRPC from waiting longer and longer before it connects again.
            raise PlaneNotThereError(
                f"the compute plane does not answer: there is no {self._address}"
            )
        try:
            response = self._stub.Describe(
                compute_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise no_answer(error, self._address) from None
        plane = description_from_proto(response)
        plane.check()
        self._described = response
        return plane

    def get_assets(self) -> ModelAssets:
        """Ask the plane for the model's tokenizer and template. Raises LinkError."""
        try:
            response = self._stub.GetModelAssets(
                compute_pb2.GetModelAssetsRequest(), timeout=UNARY_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise no_answer(error, self._address) from None
        return assets_from_proto(response)

    def open(self) -> int | None:
        """Take the plane over; its last step, or None if it is not there or not free yet.

        Takes over without asking only the session that is its own: somebody else's is respected.
        """
        self.close()
        try:
            plane = self._describe()
            self._check_same(plane)
            request = compute_pb2.OpenRequest(
                protocol_version=PROTOCOL_VERSION,
                controller=self._controller,
                take_over=self._owns(plane),
            )
            self._asked_session = plane.current_session + 1
            response = self._stub.Open(request, timeout=UNARY_TIMEOUT_S)
        except LinkError as error:
            self._complain(error.message)
            return None
        except grpc.RpcError as error:
            if reason(error):
                self._asked_session = 0  # it refused
            self._complain(why_not_open(error))
            return None
        self._asked_session = 0
        if response.epoch != plane.epoch:
            self._complain("another process was opened than the one that said what it is")
            return None
        self._plane = plane.continuing(self._plane)
        self._complaint = None
        self._last_session = response.session
        self._session = ComputeSession(
            self._stub,
            response,
            self._mailbox,
            address=self._address,
            controller=self._controller,
        )
        if self._recorder is not None:
            self._recorder.opened(self._described)
        _log.info(
            "compute plane opened",
            address=str(self._address),
            session=response.session,
            epoch=f"{response.epoch:016x}",
        )
        return response.last_step

    def _check_same(self, plane: PlaneDescription) -> None:
        """Raise unless requests may go on there and nobody else took the session away."""
        before = self._plane
        if before is None:
            return
        plane.check_continues(before)
        was_open = self._last_session > 0 and plane.epoch == before.epoch
        is_ours = plane.current_session in (self._last_session, self._asked_session)
        if was_open and not is_ours and plane.current_session > self._last_session:
            raise FencedError(
                f"the compute plane at {self._address} is in session {plane.current_session} of "
                f"another control plane; this one had session {self._last_session}"
            )

    def _owns(self, plane: PlaneDescription) -> bool:
        """Whether the session the plane is in, if any, is this controller's own."""
        before = self._plane
        return (
            before is not None
            and self._last_session > 0
            and plane.epoch == before.epoch
            and plane.current_session == self._last_session
        )

    def _complain(self, message: str) -> None:
        """Log why the plane cannot be opened, once until it changes."""
        if message != self._complaint:
            self._complaint = message
            _log.warning(
                "compute plane cannot be opened yet", address=str(self._address), error=message
            )

    def send(self, batch: StepBatch) -> None:
        """Send a step; does not wait. Raises LinkError without a session."""
        session = self._session
        if session is None:
            raise LinkError("there is no session with the compute plane")
        message = batch_to_proto(
            batch, session=session.number, epoch=session.epoch, acked_step=session.acked_step
        )
        if self._recorder is not None:
            self._recorder.sent(message)
        session.send(message)

    def receive(self, timeout_s: float | None) -> StepResult | None:
        """Wait for the next result; None after `timeout_s` or an `interrupt`.

        Raises LinkError when the session is lost: its stream broke and it cannot be resumed, or the
        plane lost count of the steps or restarted. Raises FencedError when another controller took
        over.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            session = self._session
            if session is not None:
                session.try_to_resume()
            wait_s = None if until is None else max(0.0, until - time.monotonic())
            is_broken = session is not None and session.is_broken
            if is_broken and (wait_s is None or wait_s > RESUME_PAUSE_S):
                wait_s = RESUME_PAUSE_S
            try:
                arrival = self._mailbox.get(wait_s)
            except queue.Empty:
                if is_broken and (until is None or time.monotonic() < until):
                    continue
                return None
            if arrival is None:
                return None
            if session is None or arrival.stream is not session.stream:
                continue  # the last words of a stream that was given up
            if isinstance(arrival.reply, compute_pb2.ExecutionOutput):
                return self._take(session, arrival.reply, arrival)
            session.note_broken(arrival.reply)

    def _take(
        self, session: ComputeSession, output: compute_pb2.ExecutionOutput, arrival: Arrival
    ) -> StepResult:
        """Take the reply to the oldest batch that waits for one."""
        session.take(output)
        if self._recorder is not None:
            self._recorder.received(output)
        waited_us = int((time.monotonic() - arrival.at_s) * 1e6)
        return result_from_proto(output, waited_us=waited_us)

    def interrupt(self) -> None:
        """Make a `receive` under way, or else the next one, return at once. Any thread."""
        self._mailbox.interrupt()

    def close(self) -> None:
        """End the stream and forget what is in flight."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def shut_down(self) -> None:
        """Close the stream and the channel; the client cannot be used after it."""
        self.close()
        self._channel.close()
