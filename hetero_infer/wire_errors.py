"""From what a server says on the wire back to the exceptions of `planes.errors`.

The server sends `google.rpc.Status` with an `ErrorInfo` (whose reason is the class's), a
`BadRequest` naming the field, and a `RetryInfo`; where those are missing (a proxy, a broken
connection) the gRPC code decides the family. What they say beside the class is in the exception's
`field_violations`, `retry_after_s` and `request_id`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2  # type: ignore[import-untyped] # it has no stubs
from grpc_status import rpc_status

import control_plane.core.errors
import control_plane.errors
import planes.errors
from planes.errors import (
    EngineError,
    ExecutionError,
    FieldViolation,
    MemoryError,  # noqa: A004 - the family's public name
    SchedulerError,
    ValidationError,
)

_FAMILY_BY_CODE: dict[grpc.StatusCode, type[EngineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ValidationError,
    grpc.StatusCode.OUT_OF_RANGE: ValidationError,
    grpc.StatusCode.NOT_FOUND: ValidationError,
    grpc.StatusCode.FAILED_PRECONDITION: MemoryError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: SchedulerError,
    grpc.StatusCode.UNAVAILABLE: control_plane.errors.ComputeUnavailableError,
}

_TOO_LARGE = (
    "SERVER: Received message larger than max",
    "CLIENT: Sent message larger than max",
)
"""What gRPC itself says, with both sizes, in the place of a server that never saw the message."""


class ServerLostError(ExecutionError):
    """The connection to the server broke, or none could be made."""

    reason = "SERVER_LOST"


class DeadlineExceededError(ExecutionError):
    """The time that the caller gave the call has passed; the server has given the request up."""

    reason = "DEADLINE_EXCEEDED"


_CLASS_BY_REASON: dict[str, type[EngineError]] = {
    cls.reason: cls
    for module in (planes.errors, control_plane.core.errors, control_plane.errors)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, EngineError)
}
"""What a control plane may say. Not every subclass there is: the other plane has its own."""


def error_from_rpc(error: grpc.RpcError) -> EngineError:
    """Return the exception the server meant, with its message and all it said beside it."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ServerLostError(str(error))
    message = error.details() or error.code().name
    # An asyncio error answers the same questions as a call, without being one.
    status = rpc_status.from_call(cast("grpc.Call", error))
    if status is None:
        # A server that goes away cancels what it has not finished.
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return ServerLostError(message)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(message)
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and message.startswith(_TOO_LARGE):
            return control_plane.core.errors.ContextLengthError(message)
    told = _Told(() if status is None else status.details)
    cls = _CLASS_BY_REASON.get(told.reason) or _FAMILY_BY_CODE.get(error.code(), ExecutionError)
    return told.as_error(cls, message)


class _Told:
    """What the details of a status say."""

    def __init__(self, details: Iterable[any_pb2.Any]) -> None:
        self.reason = ""
        self._request_id: str | None = None
        self._retry_after_s: float | None = None
        self._violations: tuple[FieldViolation, ...] = ()
        for detail in details:
            info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                self.reason = info.reason
                self._request_id = info.metadata.get("request_id")
            elif detail.Unpack(bad_request):
                self._violations = tuple(
                    FieldViolation(violation.field, violation.description)
                    for violation in bad_request.field_violations
                )
            elif detail.Unpack(retry):
                self._retry_after_s = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)

    def as_error(self, cls: type[EngineError], message: str) -> EngineError:
        """Build the exception without the own constructor of a class that takes more."""
        field = None
        if self._violations:
            # The wire names the path in the message, the engine the parameter; what is an object
            # in Python is JSON text there.
            field = self._violations[0].field.removeprefix("sampling.").removesuffix("_json")
        error = cls.__new__(cls)
        EngineError.__init__(error, message, field=field)
        error.retry_after_s = self._retry_after_s
        error.request_id = self._request_id
        error.field_violations = self._violations
        return error
