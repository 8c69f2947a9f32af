"""Messages of clients while they come, and while the large ones are here.

gRPC takes in whatever is sent, and bounds one message only. A thousand clients who send most of
one and never the rest would hold a gigabyte. So many may be slow at a time; where more are, the
slowest go, whoever has sent no token yet among them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from typing import Any, Final, TypeVar

import grpc.aio
import structlog

from control_plane.apart import run_apart
from control_plane.api.message_size import MAX_UNCOUNTED_BYTES
from control_plane.errors import QueueFullError, SlowSenderError
from planes.errors import ValidationError

T = TypeVar("T")

PATIENCE_S: Final = 60.0
"""For a message, from the beginning of its RPC."""

GRACE_S: Final = 0.25
"""What takes no longer is not slow. Most messages come together with the head of their RPC."""

MAX_SLOW: Final = 64
"""Slow messages, at most 16 MiB each."""

MAX_HELD_BYTES: Final = 256 << 20
"""Of messages, beyond the first `MAX_UNCOUNTED_BYTES` of each, until their RPCs have ended."""

_log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class Incoming:
    """The messages of all clients of one server; lives on its event loop.

    `max_slow`: so many may take longer than GRACE_S to come. `max_held_bytes`: of the large ones.
    """

    def __init__(self, *, max_slow: int = MAX_SLOW, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_slow = max_slow
        self._max_held_bytes = max_held_bytes
        self._num_held_bytes = 0
        self._waiting: dict[asyncio.Timeout, float] = {}  # since when, the longest first
        self._look: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def message(self, context: _Context, parse: Callable[[bytes], T]) -> AsyncIterator[T]:
        """Wait for the one message of an RPC whose handler takes a stream of bytes.

        The block is the rest of the RPC. `parse`: raises EngineError; runs on another thread where
        the message is large. Raises SlowSenderError, QueueFullError, ValidationError.
        """
        async with self.patience():
            data: Any = await context.read()
        if data is grpc.aio.EOF:  # type: ignore[attr-defined] # not in the stubs
            _log.info("no message came, or gRPC refused it for its size, as it tells the client")
            raise ValidationError("the call has no message")
        with self._hold(len(data) - MAX_UNCOUNTED_BYTES):
            if len(data) <= MAX_UNCOUNTED_BYTES:
                message = parse(data)
            else:
                message = await run_apart(parse, data)
            del data
            yield message

    async def stream(self, messages: AsyncIterable[T]) -> AsyncIterator[T]:
        """Yield messages as they come, each of which may take as long as one alone."""
        iterator = aiter(messages)
        while True:
            async with self.patience():
                try:
                    message = await anext(iterator)
                except StopAsyncIteration:
                    return
            yield message

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Wait in the block for a message. Raises SlowSenderError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                self._waiting[patience] = loop.time()
                if len(self._waiting) > self._max_slow and self._look is None:
                    self._look = loop.call_later(GRACE_S, self._send_away)
                try:
                    yield
                finally:
                    self._waiting.pop(patience, None)
        except TimeoutError:
            raise SlowSenderError(
                f"the message did not come within {PATIENCE_S:g} s, or too many others are slow"
            ) from None

    def _send_away(self) -> None:
        """End the longest of too many waits."""
        self._look = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while len(self._waiting) > self._max_slow:
            patience, since = next(iter(self._waiting.items()))
            rest = since + GRACE_S - now
            if rest > 0:
                self._look = loop.call_later(rest, self._send_away)
                return
            del self._waiting[patience]
            patience.reschedule(now)

    @contextlib.contextmanager
    def _hold(self, num_bytes: int) -> Iterator[None]:
        """Count bytes of a message that is here."""
        num_bytes = max(0, num_bytes)
        if num_bytes and self._num_held_bytes + num_bytes > self._max_held_bytes:
            raise QueueFullError("the server has as many large messages as it can")
        self._num_held_bytes += num_bytes
        try:
            yield
        finally:
            self._num_held_bytes -= num_bytes
