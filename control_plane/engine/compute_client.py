"""The gRPC side of the link: one compute plane, one session, one bidirectional stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import structlog
from google.rpc import (  # type: ignore[import-untyped] # googleapis-common-protos has no stubs
    error_details_pb2,
)
from grpc_status import rpc_status

from control_plane.core.batch import StepBatch, StepResult
from control_plane.engine.convert import (
    assets_from_proto,
    batch_to_proto,
    description_from_proto,
    result_from_proto,
)
from control_plane.engine.plane import PlaneDescription
from control_plane.errors import FencedError, LinkError
from control_plane.text.assets import ModelAssets
from planes.address import Address
from planes.transport import PROTOCOL_VERSION, plane_channel_options
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

DESCRIBE_TIMEOUT_S = 2.0
"""The first call of every attempt. An absent plane fails it at once, a stopped one not at all."""

UNARY_TIMEOUT_S = 10.0
"""GetModelAssets and Open compute nothing; a plane that is slower has a fault."""

_log = structlog.get_logger(__name__)

_Reply = compute_pb2.ExecutionOutput | grpc.RpcError | None


@dataclass(slots=True)
class _Stream:
    """One Execute stream and the session it belongs to."""

    session: int
    epoch: int
    call: grpc.CallIterator[compute_pb2.ExecutionOutput]
    requests: queue.SimpleQueue[compute_pb2.ExecutionBatch | None]
    acked_step: int


@dataclass(slots=True)
class _Mailbox:
    """What `receive` waits on: replies, tagged with their stream, and interrupts (None)."""

    items: queue.SimpleQueue[tuple[_Stream, _Reply] | None] = field(
        default_factory=queue.SimpleQueue
    )
    is_interrupted: bool = False


class ComputeClient:
    """A compute plane at an address. See `control_plane.engine.link.ComputeLink`.

    `controller` is shown in the plane's log and to a controller that it refuses. All methods belong
    to the engine thread; `interrupt` may be called from any.

    A thread per stream moves replies into the mailbox, because a plain read of the stream could
    neither time out nor be woken by a new request.
    """

    def __init__(self, address: Address, *, controller: str) -> None:
        self._address = address
        self._controller = controller
        self._channel = grpc.insecure_channel(address.target, options=plane_channel_options())
        self._stub = compute_pb2_grpc.ComputeServiceStub(self._channel)
        self._mailbox = _Mailbox()
        self._stream: _Stream | None = None
        self._plane: PlaneDescription | None = None
        self._session = 0
        self._complaint: str | None = None

    @property
    def address(self) -> Address:
        """Where the plane listens."""
        return self._address

    def describe(self) -> PlaneDescription:
        """Ask the plane what it is; this answer is what the plane to `open` must equal.

        Raises LinkError, PlaneMismatchError.
        """
        self._plane = self._describe()
        return self._plane

    def _describe(self) -> PlaneDescription:
        if not self._address.may_be_served:
            # Not asking keeps gRPC from waiting longer and longer before it connects again.
            raise LinkError(f"the compute plane does not answer: there is no {self._address}")
        try:
            response = self._stub.Describe(
                compute_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise _no_answer(error) from None
        plane = description_from_proto(response)
        plane.check()
        return plane

    def get_assets(self) -> ModelAssets:
        """Ask the plane for the model's tokenizer and template. Raises LinkError."""
        try:
            response = self._stub.GetModelAssets(
                compute_pb2.GetModelAssetsRequest(), timeout=UNARY_TIMEOUT_S
            )
        except grpc.RpcError as error:
            raise _no_answer(error) from None
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
            response = self._stub.Open(request, timeout=UNARY_TIMEOUT_S)
        except LinkError as error:
            self._complain(error.message)
            return None
        except grpc.RpcError as error:
            self._complain(_why_not_open(error))
            return None
        self._plane = plane
        self._session = response.session
        self._complaint = None
        self._start_stream(response)
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
        was_open = self._session > 0 and plane.epoch == before.epoch
        if was_open and plane.current_session > self._session:
            raise FencedError(
                f"the compute plane at {self._address} is in session {plane.current_session} of "
                f"another control plane; this one had session {self._session}"
            )

    def _owns(self, plane: PlaneDescription) -> bool:
        """Whether the session the plane is in, if any, is this controller's own."""
        before = self._plane
        return (
            before is not None
            and self._session > 0
            and plane.epoch == before.epoch
            and plane.current_session == self._session
        )

    def _complain(self, message: str) -> None:
        """Log why the plane cannot be opened, once until it changes."""
        if message != self._complaint:
            self._complaint = message
            _log.warning(
                "compute plane cannot be opened yet", address=str(self._address), error=message
            )

    def _start_stream(self, opened: compute_pb2.OpenResponse) -> None:
        requests: queue.SimpleQueue[compute_pb2.ExecutionBatch | None] = queue.SimpleQueue()
        batches: Iterator[compute_pb2.ExecutionBatch] = iter(requests.get, None)
        call = self._stub.Execute(batches)
        stream = _Stream(opened.session, opened.epoch, call, requests, opened.last_step)
        self._stream = stream
        threading.Thread(
            target=_read_replies, args=(stream, self._mailbox), name="compute-replies", daemon=True
        ).start()

    def send(self, batch: StepBatch) -> None:
        """Send a step; does not wait. Raises LinkError without a session."""
        stream = self._stream
        if stream is None:
            raise LinkError("there is no session with the compute plane")
        stream.requests.put(
            batch_to_proto(
                batch,
                session=stream.session,
                epoch=stream.epoch,
                acked_step=stream.acked_step,
            )
        )

    def receive(self, timeout_s: float | None) -> StepResult | None:
        """Wait for the next result; None after `timeout_s` or an `interrupt`.

        Raises LinkError when the stream broke or the plane lost count of the steps or restarted,
        FencedError when another controller took over.
        """
        mailbox = self._mailbox
        while True:
            try:
                item = mailbox.items.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if item is None:
                mailbox.is_interrupted = False
                return None
            stream, reply = item
            if stream is not self._stream:
                continue  # the last words of a stream that was given up
            if not isinstance(reply, compute_pb2.ExecutionOutput):
                raise _link_error(reply)
            self._check(reply)
            stream.acked_step = reply.step_id
            return result_from_proto(reply)

    def _check(self, output: compute_pb2.ExecutionOutput) -> None:
        """Raise unless the reply is one to a step: some refusals concern the session itself."""
        reason, message = output.refusal.reason, output.refusal.message
        if reason == compute_pb2.REFUSAL_REASON_STALE_SESSION:
            raise FencedError(f"another control plane took over {self._address}: {message}")
        if reason in (
            compute_pb2.REFUSAL_REASON_STALE_EPOCH,
            compute_pb2.REFUSAL_REASON_STEP_GAP,
        ):
            raise LinkError(f"the compute plane at {self._address} lost count: {message}")

    def interrupt(self) -> None:
        """Make a `receive` under way, or else the next one, return at once. Any thread."""
        # Many interrupts before one `receive` need one item. The flag falls before `receive`
        # returns, so an interrupt that finds it up is still ahead of that return.
        if not self._mailbox.is_interrupted:
            self._mailbox.is_interrupted = True
            self._mailbox.items.put(None)

    def close(self) -> None:
        """End the stream and forget what is in flight."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.requests.put(None)
            stream.call.cancel()  # type: ignore[no-untyped-call] # grpc-stubs leave it bare

    def shut_down(self) -> None:
        """Close the stream and the channel; the client cannot be used after it."""
        self.close()
        self._channel.close()


def _read_replies(stream: _Stream, mailbox: _Mailbox) -> None:
    """Move the replies of one stream into the mailbox, and then how it ended."""
    ended: grpc.RpcError | None = None
    try:
        for reply in stream.call:
            mailbox.items.put((stream, reply))
    except grpc.RpcError as error:
        ended = error
    stream.requests.put(None)  # lets gRPC's sending thread end
    mailbox.items.put((stream, ended))


def _link_error(error: grpc.RpcError | None) -> LinkError:
    what = "it closed the stream" if error is None else _details(error)
    return LinkError(f"the compute plane is lost: {what}")


def _no_answer(error: grpc.RpcError) -> LinkError:
    return LinkError(f"the compute plane does not answer: {_details(error)}")


def _why_not_open(error: grpc.RpcError) -> str:
    """Say why `Open` was refused; for the refusal that a person can mend, say how."""
    if not isinstance(error, grpc.Call) or _reason(error) != "SESSION_HELD":
        return _details(error)
    return (
        f"another control plane uses it ({error.details()}): stop that one first; this one waits "
        "and takes over when the session is free"
    )


def _reason(call: grpc.Call) -> str:
    """Return the machine-readable reason the plane gave; empty if it gave none."""
    info = error_details_pb2.ErrorInfo()
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # the details do not belong to the status: not a plane of ours
        return ""
    for packed in status.details if status is not None else ():
        if packed.Unpack(info):
            return str(info.reason)
    return ""


def _details(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error)
