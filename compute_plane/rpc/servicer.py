"""`hetero.compute.v1.ComputeService`: from RPCs to the device thread and back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Final

import grpc
import structlog

from compute_plane.errors import ProtocolMismatch, StaleEpoch, TooManyStreams
from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.work import Answer
from compute_plane.facts import PlaneAssets, PlaneFacts
from compute_plane.model.errors import printable
from compute_plane.rpc.convert import (
    assets_to_proto,
    batch_from_proto,
    facts_to_proto,
    header_from_proto,
    reply_to_proto,
)
from compute_plane.rpc.status import abort
from compute_plane.rpc.streams import ExecuteStream
from planes.errors import EngineError
from planes.transport import PROTOCOL_VERSION
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

MAX_STREAMS: Final = 8
"""Execute streams at once. One carries the session; the others are on their way out, or mistakes.
Each holds a worker thread, so the bound keeps workers free for the other calls."""

MAX_REFUSED: Final = 64
"""Refusals that are remembered, so as not to log each of them again and again."""

log = structlog.get_logger()


class ComputeServicer(compute_pb2_grpc.ComputeServiceServicer):
    """Answers the control plane and tools. Errors end RPCs by `compute_plane.rpc.status`."""

    def __init__(
        self,
        facts: PlaneFacts,
        assets: PlaneAssets,
        device: DeviceThread,
        sessions: SessionLedger,
    ) -> None:
        self._facts = facts_to_proto(facts)
        self._assets = assets_to_proto(assets)
        self._device = device
        self._sessions = sessions
        self._lock = threading.Lock()
        self._streams: set[ExecuteStream] = set()
        self._refused: set[tuple[str, str]] = set()

    def Describe(  # noqa: N802 - the name of the RPC
        self,
        request: compute_pb2.DescribeRequest,  # noqa: ARG002 - has no fields
        context: grpc.ServicerContext,  # noqa: ARG002 - cannot fail
    ) -> compute_pb2.DescribeResponse:
        """Say what this plane is and which session it is in."""
        response = compute_pb2.DescribeResponse()
        response.CopyFrom(self._facts)
        state = self._sessions.state
        response.epoch = self._sessions.epoch
        response.current_session = state.session
        response.last_step = state.last_step
        return response

    def GetModelAssets(  # noqa: N802 - the name of the RPC
        self,
        request: compute_pb2.GetModelAssetsRequest,  # noqa: ARG002 - has no fields
        context: grpc.ServicerContext,  # noqa: ARG002 - cannot fail
    ) -> compute_pb2.GetModelAssetsResponse:
        """Return the model's tokenizer, template and special ids."""
        return self._assets

    def Open(  # noqa: N802 - the name of the RPC
        self, request: compute_pb2.OpenRequest, context: grpc.ServicerContext
    ) -> compute_pb2.OpenResponse:
        """Begin a session, or go on with one whose stream broke."""
        controller = printable(request.controller)
        try:
            if request.protocol_version != PROTOCOL_VERSION:
                raise ProtocolMismatch(
                    f"protocol_version must be {PROTOCOL_VERSION}, got {request.protocol_version}",
                    field="protocol_version",
                )
            self._device.check_open()
            if request.resume_session:
                state = self._sessions.resume(request.resume_session, request.resume_epoch)
            else:
                state = self._sessions.open(controller, take_over=request.take_over)
        except EngineError as error:
            self._note_refusal(controller, error.reason)
            abort(context, error)
        with self._lock:
            self._refused.clear()
        log.info(
            "session resumed" if request.resume_session else "session opened",
            session=state.session,
            controller=controller,
            take_over=request.take_over,
        )
        return compute_pb2.OpenResponse(
            session=state.session, epoch=self._sessions.epoch, last_step=state.last_step
        )

    def _note_refusal(self, controller: str, reason: str) -> None:
        """Log it once: who waits for a session to end asks many times a second.

        Who asks for the session of a process that is gone opens another one next: no fault.
        """
        with self._lock:
            is_known = (controller, reason) in self._refused
            if not is_known and len(self._refused) == MAX_REFUSED:
                self._refused.clear()
            self._refused.add((controller, reason))
        is_fault = reason != StaleEpoch.reason
        say = log.debug if is_known else log.warning if is_fault else log.info
        say("open refused", controller=controller, reason=reason)

    def Execute(  # noqa: N802 - the name of the RPC
        self,
        request_iterator: Iterator[compute_pb2.ExecutionBatch],
        context: grpc.ServicerContext,
    ) -> Iterator[compute_pb2.ExecutionOutput]:
        """Run batches, as many under way as Describe says, until the controller ends the stream."""
        stream = ExecuteStream(
            request_iterator,
            self._device,
            self._sessions,
            context.cancel,
            self._facts.max_batches_in_flight,
        )
        try:
            self._add(stream)
            if not context.add_callback(stream.end):
                return  # the controller has left already
            for reply in stream.replies():
                yield reply_to_proto(reply)
        except EngineError as error:
            log.info("execute stream ended", reason=error.reason)
            abort(context, error)
        finally:
            with self._lock:
                self._streams.discard(stream)

    def ExecuteOne(  # noqa: N802 - the name of the RPC
        self, request: compute_pb2.ExecutionBatch, context: grpc.ServicerContext
    ) -> compute_pb2.ExecutionOutput:
        """Run one batch; a refused one ends the RPC with the refusal's status."""
        header = header_from_proto(request)
        self._sessions.touch(header.session)
        answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        try:
            self._device.submit(header, batch_from_proto(request), answers.put)
        except EngineError as error:
            abort(context, error)
        # A step may never end; the process would not either, as long as a thread waits for it.
        is_here = context.add_callback(lambda: answers.put(None))
        answer = answers.get() if is_here else None
        if answer is None:  # the caller has left, or the plane has cut it off
            return compute_pb2.ExecutionOutput()
        self._sessions.touch(header.session)
        if isinstance(answer, EngineError):
            abort(context, answer)
        if answer.refusal is not None:
            abort(context, answer.refusal)
        return reply_to_proto(answer)

    def end_streams(self, reason: EngineError) -> None:
        """End every Execute stream, after the replies it has been given."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.end(reason)

    def _add(self, stream: ExecuteStream) -> None:
        self._device.check_open()
        with self._lock:
            if len(self._streams) >= MAX_STREAMS:
                raise TooManyStreams(
                    f"at most {MAX_STREAMS} Execute streams are served at once, got another"
                )
            self._streams.add(stream)
