"""The places of the HTTP port, on a real socket of this process; its patience is made short."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from control_plane.http import connections as module
from tests.control_plane.http.raw_port import GET, SOON_S


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
        b"POST /slow HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"y" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_http_is_answered_as_openai_would(on_port, caplog, data):
    async def test(port):
        client = await port.connect(data)
        status, headers, answer = await client.answer()
        assert (status, headers["content-type"]) == (400, "application/json")
        assert json.loads(answer)["error"]["code"] == "invalid_http"
        assert await client.is_closed()
        await port.until(lambda: port.num_here == 0)
        assert port.visits.num_errors == {("http", "INVALID_HTTP"): 1}

    with caplog.at_level(logging.WARNING):
        on_port(test)
    assert caplog.records == []


def test_a_head_that_is_too_long_is_answered_with_431(on_port):
    async def test(port):
        client = await port.connect(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000)
        status, _, data = await client.answer()
        assert (status, json.loads(data)["error"]["code"]) == (431, "headers_too_large")
        assert await client.is_closed()
        assert port.visits.num_errors == {("http", "HEADERS_TOO_LARGE"): 1}

    on_port(test)


def test_a_wish_for_another_protocol_is_no_line_of_the_log(on_port, caplog):
    async def test(port):
        client = await port.connect(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        assert (await client.answer())[0] == 200

    with caplog.at_level(logging.WARNING):
        on_port(test)
    assert caplog.records == []
