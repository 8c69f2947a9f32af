"""The one table from error class to gRPC status, and the details that go with it.

Every error class of the compute plane has a row of its own, even where it equals its family's; a
test fails for a class without one. A user's subclass takes the row of its nearest ancestor.
"""

from __future__ import annotations

from typing import Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import (  # type: ignore[import-untyped] # googleapis-common-protos has no stubs
    code_pb2,
    error_details_pb2,
    status_pb2,
)
from grpc_status import rpc_status

from compute_plane import errors as shell
from compute_plane.model import errors as model
from planes import errors as families

DOMAIN: Final = "hetero-paged-infer"
"""`google.rpc.ErrorInfo.domain`."""

STATUS_OF: Final[dict[type[families.EngineError], grpc.StatusCode]] = {
    families.EngineError: grpc.StatusCode.INTERNAL,
    families.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    families.MemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    families.ValidationError: grpc.StatusCode.INVALID_ARGUMENT,
    families.ExecutionError: grpc.StatusCode.INTERNAL,
    families.SchedulerError: grpc.StatusCode.FAILED_PRECONDITION,
    families.TokenizationError: grpc.StatusCode.INVALID_ARGUMENT,
    model.ModelReferenceError: grpc.StatusCode.FAILED_PRECONDITION,
    model.ModelFileError: grpc.StatusCode.FAILED_PRECONDITION,
    model.UnsupportedModelError: grpc.StatusCode.FAILED_PRECONDITION,
    shell.DeviceUnavailableError: grpc.StatusCode.FAILED_PRECONDITION,
    shell.ExecutorLoadError: grpc.StatusCode.FAILED_PRECONDITION,
    shell.ListenError: grpc.StatusCode.FAILED_PRECONDITION,
    shell.BatchRefused: grpc.StatusCode.INVALID_ARGUMENT,
    shell.InvalidBatch: grpc.StatusCode.INVALID_ARGUMENT,
    shell.UnsupportedBatch: grpc.StatusCode.INVALID_ARGUMENT,
    shell.StepGap: grpc.StatusCode.FAILED_PRECONDITION,
    shell.StaleSession: grpc.StatusCode.FAILED_PRECONDITION,
    shell.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    shell.BatchFailed: grpc.StatusCode.INTERNAL,
    shell.GraphCaptureError: grpc.StatusCode.INTERNAL,
    shell.GraphReplayError: grpc.StatusCode.INTERNAL,
    shell.DeviceLostError: grpc.StatusCode.INTERNAL,
    shell.SessionHeld: grpc.StatusCode.FAILED_PRECONDITION,
    shell.SessionFenced: grpc.StatusCode.ABORTED,
    shell.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    shell.TooManyStreams: grpc.StatusCode.RESOURCE_EXHAUSTED,
    shell.PlaneDraining: grpc.StatusCode.UNAVAILABLE,
    shell.PlaneBroken: grpc.StatusCode.INTERNAL,
}


def status_code(error: families.EngineError) -> grpc.StatusCode:
    """Return the row of the error's class or of its nearest ancestor."""
    for cls in type(error).__mro__:
        if cls in STATUS_OF:
            return STATUS_OF[cls]
    return grpc.StatusCode.INTERNAL


def rich_status(error: families.EngineError) -> status_pb2.Status:
    """Return what a caller is told: code, message, ErrorInfo, and BadRequest for a field."""
    code = status_code(error)
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    return status_pb2.Status(
        code=code_pb2.Code.Value(code.name), message=error.message, details=details
    )


def abort(context: grpc.ServicerContext, error: families.EngineError) -> NoReturn:
    """End the RPC with the error's status."""
    context.abort_with_status(rpc_status.to_status(rich_status(error)))
    raise AssertionError("abort_with_status returned")  # it always raises; this tells mypy


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
