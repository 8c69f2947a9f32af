"""One session with a compute plane, on one stream at a time.

A stream may break while the plane and the session live: the connection was cut, or the other end
was stopped for a moment. Then nothing is lost. The session is resumed on a new stream, the batches
without an answer are sent again, and the plane repeats the replies of those that have run. The
engine loop does not notice. Only when the session is gone is the link lost.
"""

from __future__ import annotations

import time
from collections import deque

import grpc
import structlog

from control_plane.engine.compute_stream import ExecuteStream, Mailbox
from control_plane.engine.link_errors import check_session, details, link_lost, reason
from control_plane.errors import LinkError
from planes.address import Address
from planes.transport import PROTOCOL_VERSION, is_deserted
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

RESUME_TIMEOUT_S = 0.5
"""An attempt to go on with a session whose stream broke."""

RESUME_WINDOW_S = 1.0
"""How long attempts go on. Computing everything anew costs about as much as waiting longer."""

MAX_RESUMES_WITHOUT_REPLY = 8
"""When the stream breaks so often with no reply in between, what is sent again breaks it."""

_BROKEN_BY_TRANSPORT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""How a stream ends when its connection breaks. Another code is said about what was sent."""

_log = structlog.get_logger(__name__)


class ComputeSession:
    """A session, and the batches sent in it that have no answer; belongs to the engine thread.

    `opened`: the plane's answer to `Open`, sent by `controller`. `stream`: None while it is broken.
    `unanswered`: oldest first. `acked_step`: the last that has an answer.
    """

    def __init__(
        self,
        stub: compute_pb2_grpc.ComputeServiceStub,
        opened: compute_pb2.OpenResponse,
        mailbox: Mailbox,
        *,
        address: Address,
        controller: str,
    ) -> None:
        self._stub = stub
        self._mailbox = mailbox
        self._address = address
        self._controller = controller
        self.number = opened.session
        self.epoch = opened.epoch
        self.acked_step = opened.last_step
        self.stream: ExecuteStream | None = ExecuteStream(stub, (), mailbox)
        self.unanswered: deque[compute_pb2.ExecutionBatch] = deque()
        self._broken_at = 0.0
        self._broken_by: LinkError | None = None
        self._num_resumes = 0  # since the last reply

    @property
    def is_broken(self) -> bool:
        """Whether there is no stream now, and `try_to_resume` may make one."""
        return self.stream is None

    def send(self, batch: compute_pb2.ExecutionBatch) -> None:
        """Send a batch now, or once there is a stream again."""
        self.unanswered.append(batch)
        if self.stream is not None:
            self.stream.send(batch)

    def take(self, output: compute_pb2.ExecutionOutput) -> None:
        """Match a reply with the oldest batch that waits for one.

        Raises LinkError when the plane lost count, FencedError when another controller took over.
        """
        check_session(output, self._address)
        is_ours = (output.session, output.epoch) == (self.number, self.epoch)
        if not (is_ours and self.unanswered and self.unanswered[0].step_id == output.step_id):
            raise LinkError(
                f"the compute plane at {self._address} lost count: it answered step "
                f"{output.step_id} of session {output.session} out of turn"
            )
        self.unanswered.popleft()
        self.acked_step = output.step_id
        self._num_resumes = 0

    def note_broken(self, ended: grpc.RpcError | None) -> None:
        """Begin to resume the session; raise LinkError if the plane itself ended the stream."""
        self.stream = None
        self._broken_at = time.monotonic()
        self._broken_by = error = link_lost(ended)
        is_transport = ended is None or (
            isinstance(ended, grpc.Call) and ended.code() in _BROKEN_BY_TRANSPORT
        )
        if reason(ended) or not is_transport or self._num_resumes >= MAX_RESUMES_WITHOUT_REPLY:
            raise error

    def try_to_resume(self) -> None:
        """Try once to go on where the stream broke, if it did.

        Raises LinkError when there is no hope (left).
        """
        broken_by = self._broken_by
        if broken_by is None:
            return
        if is_deserted(self._address):
            raise broken_by
        request = compute_pb2.OpenRequest(
            protocol_version=PROTOCOL_VERSION,
            controller=self._controller,
            resume_session=self.number,
            resume_epoch=self.epoch,
        )
        try:
            response = self._stub.Open(request, timeout=RESUME_TIMEOUT_S)
        except grpc.RpcError as error:
            if reason(error) or time.monotonic() - self._broken_at > RESUME_WINDOW_S:
                raise LinkError(
                    f"{broken_by.message}; its session cannot be resumed: {details(error)}"
                ) from None
            return
        last_sent = self.acked_step + len(self.unanswered)
        if response.session != self.number or not (
            self.acked_step <= response.last_step <= last_sent
        ):
            raise LinkError(
                f"the compute plane at {self._address} lost count: it resumed session "
                f"{response.session} at step {response.last_step}, session {self.number} had "
                f"steps {self.acked_step} to {last_sent} under way"
            )
        self._broken_by = None
        self._num_resumes += 1
        self.stream = ExecuteStream(self._stub, self.unanswered, self._mailbox)
        _log.warning(
            "compute session resumed on a new stream",
            address=str(self._address),
            session=self.number,
            broken_by=broken_by.message,
            batches_sent_again=len(self.unanswered),
            of_these_run=response.last_step - self.acked_step,
        )

    def close(self) -> None:
        """End the stream."""
        if self.stream is not None:
            self.stream.cancel()
