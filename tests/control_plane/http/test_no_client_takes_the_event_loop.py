"""Bytes that cost much more to take in than to send: everybody else is served meanwhile."""

from __future__ import annotations

import asyncio
import json

import h11
import pytest

from control_plane.http import connections
from tests.control_plane.http.raw_port import GET, LATE_S, SOON_S

MAX_A_TURN = 200
"""Steps of the HTTP parser, and header lines, between two turns of everybody else: some ms."""

TINY = b"1\r\nx\r\n"
CHUNKED = b"POST /count HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Turns:
    """How much the parser does between two turns of the event loop, at most."""

    def __init__(self, monkeypatch) -> None:
        self.most = self.most_headers = self._now = 0
        step = h11.Connection.next_event

        def counted(conn):
            self._now += 1
            self.most = max(self.most, self._now)
            event = step(conn)
            if isinstance(event, h11.Request | h11.EndOfMessage):
                self.most_headers = max(self.most_headers, len(event.headers))
            return event

        monkeypatch.setattr(h11.Connection, "next_event", counted)

    def watch(self) -> None:
        self._now = 0
        asyncio.get_running_loop().call_soon(self.watch)


@pytest.fixture
def turns(monkeypatch):
    return Turns(monkeypatch)


def test_a_body_in_tiny_chunks_is_taken_in_a_little_at_a_time(on_port, turns):
    async def test(port):
        turns.watch()
        client = await port.connect(CHUNKED + TINY * 10_000 + b"0\r\n\r\n")
        assert (await client.answer())[2] == b"10000"

    on_port(test)
    assert turns.most <= MAX_A_TURN


def test_a_body_in_too_many_tiny_chunks_is_refused(on_port, turns):
    async def test(port):
        turns.watch()
        client = await port.connect(CHUNKED + TINY * 30_000)
        status, _, data = await client.answer()
        assert (status, json.loads(data)["error"]["code"]) == (400, "invalid_http")
        assert "chunks" in json.loads(data)["error"]["message"]
        assert await client.is_closed()

    on_port(test)
    assert turns.most <= MAX_A_TURN


def test_a_large_body_in_chunks_of_a_fair_size_is_taken(on_port):
    async def test(port):
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        client = await port.connect(CHUNKED + chunk * 4096 + b"0\r\n\r\n")
        assert (await client.answer())[2] == str(4 << 20).encode()
        assert await client.ask() == 200

    on_port(test)


def test_many_who_send_tiny_chunks_share_what_one_may_have(on_port, turns):
    async def test(port):
        turns.watch()
        clients = [await port.connect(CHUNKED) for _ in range(8)]
        for client in clients:
            client.writer.write(TINY * 2000 + b"0\r\n\r\n")
        assert [(await client.answer())[2] for client in clients] == [b"2000"] * 8

    on_port(test, limit=8)
    # What is read first of each is taken at once; the rest one after the other.
    assert turns.most <= 8 * MAX_A_TURN


def test_many_requests_at_once_are_answered_one_a_turn(on_port, turns):
    async def test(port):
        turns.watch()
        client = await port.connect()
        client.writer.write(GET * 500)
        for _ in range(500):
            assert (await client.answer())[0] == 200

    on_port(test)
    assert turns.most <= MAX_A_TURN


@pytest.mark.parametrize(
    "lines",
    [b"a:\r\n" * 60_000, b"a:\r\n" * 1000, b"a:b\r\n c\r\n" * 500],
    ids=["more than is read", "many", "folded"],
)
def test_a_head_of_many_lines_is_refused_before_it_is_parsed(on_port, turns, lines):
    async def test(port):
        client = await port.connect()
        client.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        status, _, data = await client.answer()
        assert (status, json.loads(data)["error"]["code"]) == (431, "headers_too_large")
        assert await client.is_closed()

    on_port(test)
    assert turns.most_headers <= MAX_A_TURN


def test_a_head_that_comes_byte_by_byte_is_as_good_as_any(on_port):
    async def test(port):
        client = await port.connect()
        for index in range(len(GET)):
            await client.write(GET[index : index + 1])
            await asyncio.sleep(0)
        assert (await client.answer())[0] == 200

    on_port(test)


@pytest.mark.parametrize("ahead", [GET, GET * 20_000], ids=["one", "many"])
def test_who_leaves_is_noticed_whatever_he_has_asked_for_ahead(on_port, monkeypatch, ahead):
    monkeypatch.setattr(connections, "AHEAD_PATIENCE_S", SOON_S)

    async def test(port):
        client = await port.connect(b"GET /answer HTTP/1.1\r\nHost: x\r\n\r\n")
        await port.until(lambda: port.num_slow == 1)
        client.writer.write(ahead)
        await asyncio.sleep(0.01)
        client.writer.transport.abort()
        async with asyncio.timeout(LATE_S / 4):
            await port.has_left.wait()
        await port.until(lambda: port.num_here == 0)

    on_port(test)


def test_who_leaves_is_noticed_at_a_later_request_of_those_he_sent_at_once(on_port, monkeypatch):
    monkeypatch.setattr(connections, "AHEAD_PATIENCE_S", SOON_S)

    async def test(port):
        client = await port.connect()
        client.writer.write(GET + b"GET /answer HTTP/1.1\r\nHost: x\r\n\r\n" + GET * 20_000)
        await port.until(lambda: port.num_slow == 1)
        client.writer.transport.abort()
        async with asyncio.timeout(LATE_S / 4):
            await port.has_left.wait()

    on_port(test)


def test_what_is_asked_for_ahead_is_answered_in_order(on_port):
    async def test(port):
        client = await port.connect(b"GET /answer HTTP/1.1\r\nHost: x\r\n\r\n")
        await port.until(lambda: port.num_slow == 1)
        body = b"x" * 5000
        post = f"POST /count HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        await client.write(GET + post.encode() + body + GET)
        port.go.set()
        answers = [(await client.answer())[2] for _ in range(4)]
        assert answers == [b'"ok"', b"ok", b"5000", b"ok"]

    on_port(test)


def test_bytes_behind_the_last_request_of_a_connection_spoil_no_answer(on_port):
    async def test(port):
        client = await port.connect(b"GET /answer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await port.until(lambda: port.num_slow == 1)
        await client.write(GET)
        port.go.set()
        assert (await client.answer())[2] == b'"ok"'
        assert await client.is_closed()

    on_port(test)
