"""What happens around every RPC of ours: its request id, its log line, its errors as statuses.

Servicers raise; nobody else aborts. An `EngineError` becomes its row of `control_plane.api.status`;
anything else is a fault of ours, logged loudly once and INTERNAL to the client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable
from contextvars import ContextVar
from typing import Any, cast

import grpc
import grpc.aio
import structlog

from control_plane.access.keyring import Keyring
from control_plane.access.principal import Principal, acting_as
from control_plane.api.bystanders import Bystanders
from control_plane.api.incoming import Incoming
from control_plane.api.message_size import careful_reader
from control_plane.api.status import RpcFailure, describe_error, describe_fault
from control_plane.metrics.visits import FAULT, GRPC, VisitMeter, note_error
from control_plane.tracing.trace_context import TraceContext, enter_trace, read_trace
from planes.errors import EngineError

_log = structlog.get_logger(__name__)

AUTHORIZATION = "authorization"

_request_id: ContextVar[str] = ContextVar("request_id")

# Messages and contexts of grpc.aio are generic over every method's own types.
_Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]
_OfStream = Callable[[AsyncIterable[bytes], _Context], Awaitable[Any]]
_Parse = Callable[[bytes], Any]


def current_request_id() -> str:
    """Return the id of the RPC this task serves."""
    return _request_id.get()


class RequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not at run time
    """Wraps the methods of the services whose names are given, and bounds all others.

    Handlers become such that take streams, so that messages are waited for here (`Incoming`); on
    the wire that is the same. `keyring`: whose tokens these methods ask for; None: for none. Those
    of `admin_services` ask for an operator's. Who has no token is told so before the message is
    read. `visits`: counts them. `max_message_bytes`: larger ones are refused unparsed; None: there
    are none.
    """

    def __init__(
        self,
        *services: str,
        keyring: Keyring | None = None,
        admin_services: Collection[str] = (),
        visits: VisitMeter | None = None,
        max_message_bytes: int | None = None,
    ) -> None:
        self._visits = visits or VisitMeter()
        self._max_message_bytes = max_message_bytes
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._keyring = keyring
        self._incoming = Incoming()
        self._bystanders = Bystanders(self._incoming)
        self._admin_prefixes = tuple(f"/{service}/" for service in admin_services)

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
        if handler is None:
            return handler
        if not method.startswith(self._prefixes):
            return self._bystanders.bound(handler)
        caller = self._identify(handler_call_details)
        trace = read_trace(handler_call_details.invocation_metadata or ())
        deserialize = cast(_Parse, handler.request_deserializer)
        parse = careful_reader(deserialize, self._max_message_bytes)
        if handler.response_streaming:
            behaviour = cast(_Behaviour, handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(
                self._wrap(method, behaviour, parse, caller, trace),
                response_serializer=handler.response_serializer,
            )
        behaviour = cast(_Behaviour, handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(
            self._wrap(method, behaviour, parse, caller, trace),
            response_serializer=handler.response_serializer,
        )

    def _identify(self, details: grpc.HandlerCallDetails) -> Principal | EngineError | None:
        """Return in whose name the RPC is, or why it must not be; None: nobody is asked."""
        if self._keyring is None:
            return None
        try:
            principal = self._keyring.authenticate(_authorization(details.invocation_metadata))
            if details.method.startswith(self._admin_prefixes):
                principal.require_admin()
        except EngineError as error:
            return error
        return principal

    def _wrap(
        self,
        method: str,
        behaviour: _Behaviour,
        parse: _Parse,
        caller: Principal | EngineError | None,
        trace: TraceContext | None,
    ) -> _OfStream:
        """Wrap one method. Streaming ones are coroutines too: they write to the context."""
        name = method.rpartition("/")[2]
        visits, incoming = self._visits, self._incoming

        async def count(_: AsyncIterable[bytes], context: _Context) -> Any:  # noqa: ANN401 - as above
            with visits.visit(GRPC, name):
                failure, answer = await serve(context)
            if failure is None:
                return answer
            return await context.abort(failure.code, failure.message, failure.trailing_metadata)

        async def serve(context: _Context) -> tuple[RpcFailure | None, Any]:
            request_id = uuid.uuid4().hex
            _request_id.set(request_id)
            structlog.contextvars.bind_contextvars(request_id=request_id, method=name)
            enter_trace(trace)
            if trace is not None:
                structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)
            started = time.monotonic()
            code = grpc.StatusCode.OK
            failure: RpcFailure | None = None
            try:
                if isinstance(caller, EngineError):
                    raise caller
                async with incoming.message(context, parse) as request:
                    if not isinstance(caller, Principal):
                        return None, await behaviour(request, context)
                    structlog.contextvars.bind_contextvars(token_name=caller.name)
                    with acting_as(caller):
                        return None, await behaviour(request, context)
            except asyncio.CancelledError:
                # Cancelled by the client, disconnected, or past its deadline.
                code = grpc.StatusCode.CANCELLED
                raise
            except EngineError as error:
                failure = describe_error(error, request_id)
                note_error(error.reason)
                facts = {"reason": error.reason, "field": error.field}
                if failure.code is grpc.StatusCode.INTERNAL:
                    _log.error("rpc refused", **facts, error=failure.message)
                else:  # without the message: it may quote the request, prompts too
                    _log.info("rpc refused", **facts)
            # A fault must reach the log and the client, whatever it is; the server goes on.
            except Exception:  # noqa: BLE001
                failure = describe_fault(request_id)
                note_error(FAULT)
                _log.exception("rpc failed")
            finally:
                code = failure.code if failure is not None else code
                _log.debug("rpc ended", code=code.name, seconds=time.monotonic() - started)
            return failure, None

        return count


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the one `authorization` there is; of several, nobody knows which is meant."""
    found = [value for key, value in metadata or () if key == AUTHORIZATION]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None
