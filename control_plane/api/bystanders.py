"""Services on the public port that are not ours: health and reflection, without tokens.

Anybody may call them, and a watcher of the health stays as long as he likes: there are so many
calls of them at a time, and their messages are short.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

import grpc
import grpc.aio

from control_plane.api.incoming import Incoming
from control_plane.api.message_size import careful_reader
from control_plane.api.status import describe_error
from control_plane.errors import QueueFullError
from planes.errors import EngineError

MAX_CALLS: Final = 1024
MAX_MESSAGE_BYTES: Final = 16 << 10
"""Names of services and of files."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Bystanders:
    """Bounds the calls of such services; lives on the event loop of their server."""

    def __init__(self, incoming: Incoming, *, max_calls: int = MAX_CALLS) -> None:
        self._incoming = incoming
        self._max_calls = max_calls
        self._num_calls = 0

    def bound(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method, bounded. Its behaviour is one of `grpc.aio`."""
        read = cast(Callable[[bytes], Any], handler.request_deserializer)
        parse = careful_reader(read, MAX_MESSAGE_BYTES)
        if handler.request_streaming:
            stream = cast(
                Callable[[AsyncIterable[Any], _Context], AsyncIterator[Any]], handler.stream_stream
            )

            async def answer_each(
                messages: AsyncIterable[bytes], context: _Context
            ) -> AsyncIterator[Any]:
                async with self._call(context):
                    parsed = (parse(data) async for data in self._incoming.stream(messages))
                    async for answer in stream(parsed, context):
                        yield answer

            return grpc.stream_stream_rpc_method_handler(
                answer_each,
                response_serializer=handler.response_serializer,
            )
        behaviour = cast(
            Callable[[Any, _Context], Awaitable[Any]],
            handler.unary_stream if handler.response_streaming else handler.unary_unary,
        )

        async def answer(_: AsyncIterable[bytes], context: _Context) -> Any:  # noqa: ANN401 - the method's own message type
            async with self._call(context), self._incoming.message(context, parse) as request:
                return await behaviour(request, context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(answer, response_serializer=handler.response_serializer)

    @contextlib.asynccontextmanager
    async def _call(self, context: _Context) -> AsyncIterator[None]:
        """Count a call; an error of it becomes its status."""
        try:
            if self._num_calls >= self._max_calls:
                raise QueueFullError(
                    f"at most {self._max_calls} calls of health and reflection at a time"
                )
            self._num_calls += 1
            try:
                yield
            finally:
                self._num_calls -= 1
        except EngineError as error:
            failure = describe_error(error)
            await context.abort(failure.code, failure.message, failure.trailing_metadata)
