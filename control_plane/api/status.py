"""The one table from error class to gRPC status and HTTP status, and the details that go with it.

Every error class of the control plane has a row of its own, even where it equals its family's; a
test fails for a class without one. A user's subclass takes the row of its nearest ancestor.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import (  # type: ignore[import-untyped] # googleapis-common-protos has no stubs
    code_pb2,
    error_details_pb2,
    status_pb2,
)

from control_plane import errors as shell
from control_plane.core import errors as core
from control_plane.core.generation_params import GenerationParams
from planes import errors as families

DOMAIN = "hetero-paged-infer"
"""`google.rpc.ErrorInfo.domain`."""

MAX_MESSAGE_CHARACTERS = 300
"""A message travels percent-encoded, and in the details twice more; clients take 8 kB of it all."""

STATUS_OF: dict[type[families.EngineError], grpc.StatusCode] = {
    families.EngineError: grpc.StatusCode.INTERNAL,
    families.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    families.MemoryError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    families.ValidationError: grpc.StatusCode.INVALID_ARGUMENT,
    families.ExecutionError: grpc.StatusCode.INTERNAL,
    families.SchedulerError: grpc.StatusCode.INTERNAL,
    families.TokenizationError: grpc.StatusCode.INVALID_ARGUMENT,
    core.OutOfBlocksError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    core.ContextLengthError: grpc.StatusCode.INVALID_ARGUMENT,
    core.RequestNeverFitsError: grpc.StatusCode.FAILED_PRECONDITION,
    shell.ModelNotFoundError: grpc.StatusCode.NOT_FOUND,
    shell.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    shell.SlowReaderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    shell.SlowSenderError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    shell.RequestNotFoundError: grpc.StatusCode.NOT_FOUND,
    shell.DrainingError: grpc.StatusCode.UNAVAILABLE,
    shell.ComputeUnavailableError: grpc.StatusCode.UNAVAILABLE,
    shell.RequestFailedError: grpc.StatusCode.INTERNAL,
    shell.RequestCancelledError: grpc.StatusCode.CANCELLED,
    shell.EngineStoppedError: grpc.StatusCode.INTERNAL,
    shell.LinkError: grpc.StatusCode.UNAVAILABLE,
    shell.PlaneNotThereError: grpc.StatusCode.UNAVAILABLE,
    shell.UnreadableTokensError: grpc.StatusCode.FAILED_PRECONDITION,
    shell.FencedError: grpc.StatusCode.UNAVAILABLE,
    shell.PlaneMismatchError: grpc.StatusCode.UNAVAILABLE,
    shell.TokenMissingError: grpc.StatusCode.UNAUTHENTICATED,
    shell.TokenUnknownError: grpc.StatusCode.UNAUTHENTICATED,
    shell.AdminTokenRequiredError: grpc.StatusCode.PERMISSION_DENIED,
    shell.TooManyConcurrentRequestsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    shell.TokenRateError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

HTTP_STATUS_OF: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.CANCELLED: 503,  # by us: who cancels himself hears no answer
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""The same rows for HTTP: every code that `STATUS_OF` may name."""

PROTO_FIELDS = {
    **{field.name: f"sampling.{field.name}" for field in dataclasses.fields(GenerationParams)},
    "token_ids": "token_ids.ids",
    "chat_template_kwargs": "chat_template_kwargs_json",
    "continued": "received_token_ids",
}
"""Where a core parameter's name differs from its path in `GenerateRequest`."""


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """How an RPC ends: code, message, and `google.rpc.Status` in the trailing metadata."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def status_code(error: families.EngineError) -> grpc.StatusCode:
    """Return the row of the error's class or of its nearest ancestor."""
    for cls in type(error).__mro__:
        if cls in STATUS_OF:
            return STATUS_OF[cls]
    return grpc.StatusCode.INTERNAL


def http_status(error: families.EngineError) -> int:
    """Return the HTTP status of the same row."""
    return HTTP_STATUS_OF[status_code(error)]


def describe_error(error: families.EngineError, request_id: str | None = None) -> RpcFailure:
    """Return what a client is told about an error of a request."""
    code = status_code(error)
    metadata = {} if request_id is None else {"request_id": request_id}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    details: list[any_pb2.Any] = [_pack(info)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_proto_path(error.field), description=shorten(error.message)
        )
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return _failure(code, error.message, details)


def _proto_path(field: str) -> str:
    """Return the path in `GenerateRequest` of a core parameter, or of something within one."""
    name, *rest = re.split(r"(?=[.\[])", field, maxsplit=1)
    return "".join((PROTO_FIELDS.get(name, name), *rest))


def describe_fault(request_id: str) -> RpcFailure:
    """Return what a client is told about a fault of ours: where to find it in the log, no more."""
    info = error_details_pb2.ErrorInfo(
        reason="INTERNAL", domain=DOMAIN, metadata={"request_id": request_id}
    )
    message = f"internal error; the server's log has it under request {request_id}"
    return _failure(grpc.StatusCode.INTERNAL, message, [_pack(info)])


def _failure(code: grpc.StatusCode, message: str, details: list[any_pb2.Any]) -> RpcFailure:
    message = shorten(message)
    status = status_pb2.Status(code=getattr(code_pb2, code.name), message=message, details=details)
    return RpcFailure(code, message, (("grpc-status-details-bin", status.SerializeToString()),))


def shorten(message: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Cut a message that quotes what a caller sent: it travels as metadata, which has a limit."""
    return message if len(message) <= limit else message[:limit] + "…"


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
