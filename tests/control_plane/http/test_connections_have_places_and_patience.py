"""The places of the HTTP port, on a real socket of this process; its patience is made short."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from control_plane.http import connections as module
from control_plane.http.connections import Connections, refuse_connection

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SOON_S, LATE_S = 0.05, 20.0


class Port:
    """A server with few places. Requests to `/slow` wait for `go`; bodies are refused unread."""

    def __init__(self, limit: int) -> None:
        self.go = asyncio.Event()
        self.num_slow = 0
        self.places = Connections(limit, refuse_connection)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self._listener = listener
        self._clients: list[Client] = []

    async def __aenter__(self) -> Port:
        config = uvicorn.Config(
            self._app, http=self.places.protocol(), interface="asgi3", lifespan="off",
            log_config=None, log_level="critical", timeout_keep_alive=20,
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
        elif request.url.path == "/refused":
            response = PlainTextResponse("no", 413)
        elif request.url.path == "/large":
            response = PlainTextResponse("x" * (24 << 20))
        await response(scope, receive, send)

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


@pytest.fixture
def on_port():
    def run(test, limit: int = 4) -> None:
        async def go() -> None:
            async with Port(limit) as port:
                await test(port)

        asyncio.run(go())

    return run


def test_who_waits_for_nothing_gives_way_the_longest_idle_first(on_port):
    async def test(port):
        half_open = await port.connect(b"GET / HT")
        kept = await port.connect()
        assert await kept.ask() == 200
        busy = [await port.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
        await port.until(lambda: port.num_slow == 2)
        assert await (await port.connect()).ask() == 200
        assert await half_open.is_closed()
        assert await (await port.connect()).ask() == 200
        assert await kept.is_closed()
        port.go.set()
        assert [(await client.answer())[0] for client in busy] == [200, 200]

    on_port(test)


def test_where_everybody_is_served_who_comes_is_told_to_come_again(on_port):
    async def test(port):
        busy = [await port.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(4)]
        await port.until(lambda: port.num_slow == 4)
        late = await port.connect(GET)
        status, headers, data = await late.answer()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert json.loads(data)["error"]["code"] == "too_many_connections"
        assert await late.is_closed()
        port.go.set()
        assert [(await client.answer())[0] for client in busy] == [200] * 4
        await port.until(lambda: port.num_here == 4)
        assert await (await port.connect()).ask() == 200

    on_port(test)


def test_hundreds_of_half_open_connections_keep_nobody_out(on_port):
    async def test(port):
        held = [await port.connect(b"POST / HTTP/1.1\r\nHos") for _ in range(300)]
        for _ in range(10):
            assert await (await port.connect()).ask() == 200
        assert port.num_here <= 16
        assert all([await client.is_closed() for client in held[:200]])

    on_port(test, limit=16)


def test_a_head_that_does_not_end_is_answered_with_408(on_port, monkeypatch):
    monkeypatch.setattr(module, "HEAD_PATIENCE_S", SOON_S)

    async def test(port):
        silent = await port.connect()
        slow = await port.connect(b"GET / HTTP/1.1\r\n")
        second = await port.connect()
        assert await second.ask() == 200
        await second.write(b"GET /")
        for client in (slow, second):
            status, _, data = await client.answer()
            assert (status, json.loads(data)["error"]["code"]) == (408, "request_timeout")
            assert await client.is_closed()
        assert await silent.is_closed()
        # Who is served, or pauses between two requests, is not meant.
        kept = await port.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(3 * SOON_S)
        port.go.set()
        assert (await kept.answer())[0] == 200
        await asyncio.sleep(3 * SOON_S)
        assert await kept.ask() == 200

    on_port(test)


def test_the_rest_of_a_refused_body_is_read_so_that_its_client_finds_the_answer(on_port):
    async def test(port):
        body = b"x" * (8 << 20)
        head = f"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client = await port.connect(head.encode())
        await client.write(body)
        assert (await client.answer())[0] == 413
        assert await client.ask() == 200

    on_port(test)


def test_the_rest_of_a_refused_body_is_not_waited_for_for_ever(on_port, monkeypatch):
    monkeypatch.setattr(module, "REST_PATIENCE_S", SOON_S)

    async def test(port):
        head = b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        client = await port.connect(head + b"\r\nx")
        assert (await client.answer())[0] == 413
        assert await client.is_closed()
        # Who asked whether to send it will not.
        client = await port.connect(head + b"Expect: 100-continue\r\n\r\n")
        assert (await client.answer())[0] == 413
        assert await client.is_closed()

    on_port(test)


def test_an_answer_that_nobody_reads_holds_no_place(on_port):
    async def test(port):
        deaf = [await port.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(4)]
        await port.until(lambda: len(port.places._idle) == 4)
        for _ in range(4):
            assert await (await port.connect()).ask() == 200
        assert port.num_here == 4
        assert len(deaf) == 4

    on_port(test)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_http_is_answered_as_openai_would(on_port, data):
    async def test(port):
        client = await port.connect(data)
        status, headers, answer = await client.answer()
        assert (status, headers["content-type"]) == (400, "application/json")
        assert json.loads(answer)["error"]["code"] == "invalid_http"
        assert await client.is_closed()
        await port.until(lambda: port.num_here == 0)

    on_port(test)
