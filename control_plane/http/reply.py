"""Answers: JSON or server-sent events, made while the client is there and dropped when it leaves.

An answer is made by one coroutine that writes to the connection rather than by a generator: when
it is cancelled it hears of it at its `await`, and leaves the engine's requests through their
`async with`; a generator would sit at its `yield` until it is collected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from control_plane.engine.send_patience import SendPatience, send_patience
from control_plane.engine.streams import SEND_PATIENCE_S
from control_plane.errors import SlowReaderError
from control_plane.http.json_text import Spelled, spell, to_json
from control_plane.metrics.visits import note_streamed

_log = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect a stream first would spoil it
]


class Connection:
    """The client's end of one request, for whoever writes the answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._patience: SendPatience | None = None

    async def send_json(self, body: object) -> None:
        """Write a whole answer, in which some may be `Spelled`."""
        pieces = await spell(body)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(sum(map(len, pieces))).encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces[:-1]:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await self._send({"type": "http.response.body", "body": pieces[-1]})

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[None]:
        """Write a stream of events in the block, in which an error is an event, no status.

        Raises ClientDisconnect where the client takes nothing for too long.
        """
        note_streamed()
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS}
        )
        try:
            async with send_patience(SEND_PATIENCE_S) as self._patience:
                yield
        except SlowReaderError:
            _log.info("http client takes nothing", seconds=SEND_PATIENCE_S)
            raise ClientDisconnect from None
        await self._send({"type": "http.response.body", "body": b""})

    async def send_events(self, *data: object, name: str | None = None) -> None:
        """Write events at once; `name`: of each of them."""
        prefix = b"data: " if name is None else b"event: " + name.encode() + b"\ndata: "
        texts = [b"".join(one.pieces) if isinstance(one, Spelled) else to_json(one) for one in data]
        await self._write(b"".join([prefix + text + b"\n\n" for text in texts]))

    async def send_done(self) -> None:
        """Write the event that ends OpenAI's streams."""
        await self._write(DONE)

    async def _write(self, data: bytes) -> None:
        patience = self._patience
        if patience is None:
            raise RuntimeError("events are written within `events`")
        patience.begin()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            patience.end()


class Reply(Response):
    """A response that `work` writes, as long as the client listens.

    Raises whatever `work` raises; that becomes a status if nothing was written before. A client
    who is gone, or takes nothing, is no error: the answer stays unfinished.
    """

    def __init__(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Run the work; end it when the client is gone."""
        work = asyncio.ensure_future(self._work(Connection(send)))
        gone = asyncio.ensure_future(_wait_until_gone(receive))
        both: list[asyncio.Future[None]] = [work, gone]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            # The engine's requests are left before the connection counts as closed.
            await asyncio.wait(both)
        if not work.cancelled():
            with contextlib.suppress(ClientDisconnect):
                work.result()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
