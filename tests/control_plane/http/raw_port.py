"""A small server on a real socket of this process, and a client that writes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from control_plane.http.connections import protocol_of
from control_plane.http.json_text import SpelledList
from control_plane.http.places import Connections, refuse_connection
from control_plane.http.reply import Connection, Reply
from control_plane.metrics.visits import VisitMeter

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SOON_S, LATE_S = 0.05, 20.0
LARGE = 24 << 20
"""Bytes of an answer that no socket holds."""


class Port:
    """A server with few places.

    `/slow` and `/answer` wait for `go`, `/answer` as long as its client is there; `/refused` reads
    no body, `/count` counts one; `/large`, `/long` and `/stream` answer at length.
    """

    def __init__(self, limit: int) -> None:
        self.go = asyncio.Event()
        self.has_left = asyncio.Event()
        self.num_slow = 0
        self.visits = VisitMeter()
        self.places = Connections(limit, refuse_connection, self.visits)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self._listener = listener
        self._clients: list[Client] = []

    async def __aenter__(self) -> Port:
        config = uvicorn.Config(
            self._app, http=protocol_of(self.places), interface="asgi3", lifespan="off",
            log_config=None, log_level="warning", timeout_keep_alive=20,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext
        self._serving = asyncio.create_task(self.server.serve([self._listener]))
        await self.until(lambda: self.server.started)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        for client in self._clients:
            client.writer.transport.abort()
        self.server.should_exit = True
        await self._serving

    async def _app(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        response: Response = PlainTextResponse("ok")
        if request.url.path == "/slow":
            self.num_slow += 1
            await self.go.wait()
        elif request.url.path == "/answer":
            response = Reply(self._answer)
        elif request.url.path == "/long":
            response = Reply(_answer_at_length)
        elif request.url.path == "/stream":
            response = Reply(_stream)
        elif request.url.path == "/count":
            try:
                response = PlainTextResponse(str(len(await request.body())))
            except ClientDisconnect:
                return
        elif request.url.path == "/refused":
            response = PlainTextResponse("no", 413)
        elif request.url.path == "/large":
            response = PlainTextResponse("x" * LARGE)
        await response(scope, receive, send)

    async def _answer(self, connection: Connection) -> None:
        """Answer when it is time to; `has_left`: whoever asked has not waited for it."""
        self.num_slow += 1
        try:
            await self.go.wait()
            await connection.send_json("ok")
        except asyncio.CancelledError:
            self.has_left.set()
            raise

    async def connect(self, data: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection(*self.address)
        client = Client(reader, writer)
        self._clients.append(client)
        await client.write(data)
        return client

    async def until(self, holds) -> None:
        async with asyncio.timeout(LATE_S):
            while not holds():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.002)

    @property
    def num_here(self) -> int:
        return len(self.server.server_state.connections)


class Client:
    def __init__(self, reader, writer) -> None:
        self.reader, self.writer = reader, writer

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(LATE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.split("\r\n")[:-2]
            headers = dict(line.lower().split(": ", 1) for line in lines)
            data = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, data

    async def ask(self) -> int:
        await self.write(GET)
        return (await self.answer())[0]

    async def is_closed(self) -> bool:
        async with asyncio.timeout(LATE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


async def _answer_at_length(connection: Connection) -> None:
    members = SpelledList()
    for _ in range(3000):
        members.extend(["é" * 1000])
    await connection.send_json({"list": members.joined(), "end": 1})


async def _stream(connection: Connection) -> None:
    async with connection.events():
        for _ in range(LARGE >> 20):
            await connection.send_events("x" * (1 << 20))
