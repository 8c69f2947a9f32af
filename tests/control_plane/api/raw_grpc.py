"""A client of gRPC that sends what it likes: parts of messages, or nothing at all."""

from __future__ import annotations

import asyncio
import struct

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
INITIAL_WINDOW_SIZE = 4
END_HEADERS = 4
ACK = 1

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """One frame (RFC 9113, section 4.1)."""
    return (
        struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data
    )


def field(name: str, value: str) -> bytes:
    """A header that is written out (RFC 7541, section 6.2.2)."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def message(data: bytes, *, size: int | None = None) -> bytes:
    """A message, or the beginning of one of `size` bytes."""
    return b"\0" + struct.pack(">I", len(data) if size is None else size) + data


class RawClient:
    """One connection. `settings`: of the server, by number; `ended`: streams that it has ended."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._next_stream = 1
        self.settings: dict[int, int] = {}
        self.ended: set[int] = set()
        self.is_closed = False
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, address: str) -> RawClient:
        host, port = address.rsplit(":", 1)
        client = cls(*await asyncio.open_connection(host, int(port)))
        client._writer.write(PREFACE + frame(SETTINGS, 0, 0))
        return client

    def call(self, method: str, data: bytes = b"") -> int:
        """Begin a call and send some of its message; the number of its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        head = b"".join(
            field(*pair)
            for pair in (
                (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x"),
                ("te", "trailers"), ("content-type", "application/grpc"),
            )
        )  # fmt: skip
        self._writer.write(frame(HEADERS, END_HEADERS, stream, head))
        self.send(stream, data)
        return stream

    def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        """Send more of a message, not more than the first window holds."""
        for at in range(0, len(data), 16384):
            self._writer.write(frame(DATA, 0, stream, data[at : at + 16384]))
        if ends:
            self._writer.write(frame(DATA, 1, stream))

    async def until(self, holds) -> None:
        """Wait until something holds after a frame."""
        async with asyncio.timeout(20), self._news:
            await self._news.wait_for(holds)

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.transport.abort()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:]) & 0x7FFF_FFFF
                data = await self._reader.readexactly(int.from_bytes(head[:3]))
                async with self._news:
                    self._take(kind, flags, stream, data)
                    self._news.notify_all()
        except (asyncio.IncompleteReadError, ConnectionError):
            async with self._news:
                self.is_closed = True
                self._news.notify_all()

    def _take(self, kind: int, flags: int, stream: int, data: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.settings |= dict(struct.iter_unpack(">HI", data))
            self._writer.write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, ACK, 0, data))
        elif kind in (HEADERS, DATA) and flags & 1:
            self.ended.add(stream)
