"""Answers that nobody reads hold no place for long, however the connection is to end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from control_plane.http import reply, transport
from tests.control_plane.http.raw_port import GET, LATE_S, SOON_S

LARGE_ONE = b"GET /large HTTP/1.1\r\nHost: x\r\n"
DEAF = {
    "the last request of its connection": LARGE_ONE + b"Connection: close\r\n\r\n",
    "one of many": LARGE_ONE + b"\r\n",
    "the first of two": LARGE_ONE + b"\r\n" + GET,
    "a stream": b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("data", DEAF.values(), ids=DEAF)
def test_an_answer_that_nobody_reads_ends_its_connection(on_port, monkeypatch, caplog, data):
    monkeypatch.setattr(transport, "UNREAD_PATIENCE_S", SOON_S)
    monkeypatch.setattr(reply, "SEND_PATIENCE_S", SOON_S)

    async def test(port):
        await port.connect(data)
        await port.until(lambda: port.num_here == 1)
        await port.until(lambda: port.num_here == 0)

    with caplog.at_level(logging.WARNING):
        on_port(test)
    assert caplog.records == []


def test_a_stream_that_nobody_reads_is_given_up_by_itself(on_port, monkeypatch, caplog):
    monkeypatch.setattr(reply, "SEND_PATIENCE_S", SOON_S)

    async def test(port):
        await port.connect(DEAF["a stream"])
        await port.until(lambda: port.places.num_closing == 1)
        assert port.num_here == 1

    with caplog.at_level(logging.WARNING):
        on_port(test)
    assert caplog.records == []


def test_who_does_not_read_gives_way_when_his_connection_is_to_end(on_port, monkeypatch):
    monkeypatch.setattr(reply, "SEND_PATIENCE_S", SOON_S)

    async def test(port):
        kinds = [DEAF["the last request of its connection"], DEAF["a stream"]] * 2
        for data in kinds:
            await port.connect(data)
        await port.until(lambda: port.places.num_closing == 4)
        for _ in range(6):
            assert await (await port.connect()).ask() == 200
        assert port.num_here == 4

    on_port(test)


def test_who_is_refused_a_place_makes_none_for_others(on_port):
    async def test(port):
        slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(4):
            await port.connect(slow)
        await port.until(lambda: port.num_slow == 4)
        for _ in range(3):
            late = [await port.connect(GET) for _ in range(3)]
            assert [(await client.answer())[0] for client in late] == [503] * 3
        assert port.num_slow == 4

    on_port(test)


class Buffered:
    """A transport whose buffer has these sizes, one at each look."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = list(sizes)
        self.is_aborted = asyncio.Event()
        self.write = None

    def get_write_buffer_size(self) -> int:
        return self.sizes.pop(0)

    def close(self) -> None:
        assert self.sizes

    abort = property(lambda self: self.is_aborted.set)


@pytest.mark.parametrize("sizes", [(9, 9), (9, 5, 5, 3, 3, 3), (0, 0), (9, 12)])
def test_who_reads_slowly_is_waited_for_and_who_stops_is_not(monkeypatch, sizes):
    monkeypatch.setattr(transport, "UNREAD_PATIENCE_S", 0.001)

    async def test():
        plain, closed = Buffered(*sizes), []
        watched = transport.WatchedTransport(
            plain, asyncio.get_running_loop(), lambda: closed.append(1)
        )
        watched.close()
        watched.close()
        watched.unwatch()  # to no avail: it is to end
        async with asyncio.timeout(LATE_S):
            await plain.is_aborted.wait()
        assert closed == [1]
        assert plain.sizes == []

    asyncio.run(test())
