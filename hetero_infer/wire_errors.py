"""From what a server says on the wire back to the exceptions of `planes.errors`.

The server sends `google.rpc.Status` with an `ErrorInfo` (whose reason is the class's), a
`BadRequest` naming the field, and a `RetryInfo`; where those are missing (a proxy, a broken
connection) the gRPC code decides the family.
"""

from __future__ import annotations

from typing import cast

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped] # it has no stubs
from grpc_status import rpc_status

import control_plane.core.errors
import control_plane.errors
import planes.errors
from planes.errors import (
    EngineError,
    ExecutionError,
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


class ServerLostError(ExecutionError):
    """The connection to the server broke, or none could be made."""

    reason = "SERVER_LOST"


_CLASS_BY_REASON: dict[str, type[EngineError]] = {
    cls.reason: cls
    for module in (planes.errors, control_plane.core.errors, control_plane.errors)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, EngineError)
}
"""What a control plane may say. Not every subclass there is: the other plane has its own."""


def error_from_rpc(error: grpc.RpcError) -> EngineError:
    """Return the exception the server meant, with its message, reason and field."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ServerLostError(str(error))
    message = error.details() or error.code().name
    reason, field = "", None
    # An asyncio error answers the same questions as a call, without being one.
    status = rpc_status.from_call(cast("grpc.Call", error))
    for detail in status.details if status is not None else ():
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            # The wire names the path in the message, the engine the parameter.
            field = bad_request.field_violations[0].field.removeprefix("sampling.")
    if status is None and error.code() is grpc.StatusCode.UNAVAILABLE:
        return ServerLostError(message)
    cls = _CLASS_BY_REASON.get(reason) or _FAMILY_BY_CODE.get(error.code(), ExecutionError)
    return _make(cls, message, field)


def _make(cls: type[EngineError], message: str, field: str | None) -> EngineError:
    """Build the exception without the own constructor of a class that takes something else."""
    error = cls.__new__(cls)
    EngineError.__init__(error, message, field=field)
    return error
