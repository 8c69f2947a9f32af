"""What happens around every RPC of ours: its request id, its log line, its errors as statuses.

Servicers raise; nobody else aborts. An `EngineError` becomes its row of `control_plane.api.status`;
anything else is a fault of ours, logged loudly once and INTERNAL to the client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from control_plane.api.status import RpcFailure, describe_error, describe_fault
from planes.errors import EngineError, ValidationError

_log = structlog.get_logger(__name__)

_request_id: ContextVar[str] = ContextVar("request_id")

# Messages and contexts of grpc.aio are generic over every method's own types.
_Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]


def current_request_id() -> str:
    """Return the id of the RPC this task serves."""
    return _request_id.get()


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not at run time
    """Wraps the methods of the services whose names are given; health and reflection stay bare."""

    def __init__(self, *services: str) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._prefixes):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._wrap(method, cast(_Behaviour, handler.unary_stream)),
                request_deserializer=_never_raise(handler.request_deserializer),
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._wrap(method, cast(_Behaviour, handler.unary_unary)),
            request_deserializer=_never_raise(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _wrap(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        """Wrap one method. Streaming ones are coroutines too: they write to the context."""
        name = method.rpartition("/")[2]

        async def serve(request: Any, context: _Context) -> Any:  # noqa: ANN401 - as above
            request_id = uuid.uuid4().hex
            _request_id.set(request_id)
            structlog.contextvars.bind_contextvars(request_id=request_id, method=name)
            started = time.monotonic()
            code = grpc.StatusCode.OK
            failure: RpcFailure | None = None
            try:
                if isinstance(request, EngineError):
                    raise request
                return await behaviour(request, context)
            except asyncio.CancelledError:
                # Cancelled by the client, disconnected, or past its deadline.
                code = grpc.StatusCode.CANCELLED
                raise
            except EngineError as error:
                failure = describe_error(error)
                is_ours = failure.code is grpc.StatusCode.INTERNAL
                tell = _log.error if is_ours else _log.info
                tell("rpc refused", reason=error.reason, error=failure.message)
            # A fault must reach the log and the client, whatever it is; the server goes on.
            except Exception:  # noqa: BLE001
                failure = describe_fault(request_id)
                _log.exception("rpc failed")
            finally:
                code = failure.code if failure is not None else code
                _log.debug("rpc ended", code=code.name, seconds=time.monotonic() - started)
            return await context.abort(failure.code, failure.message, failure.trailing_metadata)

        return serve


def _never_raise(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Give the method an error in place of a message that cannot be read.

    gRPC itself would answer UNKNOWN, and log a caller's mistake as a fault of ours.
    """
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:  # noqa: ANN401 - the method's own message type
        try:
            return deserialize(data)
        except DecodeError as error:
            return ValidationError(f"the message cannot be read: {error}")

    return read
