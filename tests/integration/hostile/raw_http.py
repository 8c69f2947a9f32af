"""HTTP as bytes on a socket, for what no client library would send."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Iterator

from planes.address import Address
from tests.integration.asking import PATIENCE_S

JSON = "Content-Type: application/json"


def head(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode(
        "latin-1"
    )


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """A request whose length is told."""
    length = f"Content-Length: {len(body)}"
    return head("POST", path, length, *(headers or (JSON,)), version=version) + body


def chunked(path: str, *chunks: bytes) -> bytes:
    """A request in chunks, as they are."""
    return head("POST", path, JSON, "Transfer-Encoding: chunked") + b"".join(chunks)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class RawClient:
    """One connection."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection((address.host, address.port), timeout=PATIENCE_S)
        self._buffer = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *data: bytes) -> None:
        """Write it all; a server that has closed its end is none of the client's business."""
        with contextlib.suppress(ConnectionError):
            for piece in data:
                self.socket.sendall(piece)

    def more(self) -> bytes:
        """The next bytes; none at the end."""
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def until(self, end: bytes) -> bytes:
        """What comes up to there; the rest is kept."""
        while end not in self._buffer:
            data = self.more()
            assert data, self._buffer
            self._buffer += data
        found, _, self._buffer = self._buffer.partition(end)
        return found + end

    def answer(self, *, has_body: bool = True) -> tuple[int, bytes, bytes]:
        """Status, head and body of the next answer that is no `100 Continue`."""
        text = self.until(b"\r\n\r\n")
        status = int(text.split()[1])
        length = re.search(rb"(?i)content-length: (\d+)", text)
        if status == 100 or not has_body:
            return status, text, b""
        if length is not None:
            while len(self._buffer) < int(length[1]):
                data = self.more()
                assert data, (text, self._buffer)
                self._buffer += data
            body, self._buffer = self._buffer[: int(length[1])], self._buffer[int(length[1]) :]
            return status, text, body
        if b"chunked" in text.lower():
            return status, text, b"".join(self._chunks())
        return status, text, self.rest()

    def _chunks(self) -> Iterator[bytes]:
        while True:
            size = int(self.until(b"\r\n"), 16)
            while len(self._buffer) < size + 2:
                self._buffer += self.more()
            data, self._buffer = self._buffer[:size], self._buffer[size + 2 :]
            if not size:
                return
            yield data

    def rest(self) -> bytes:
        """What comes up to the end of the connection."""
        data = self._buffer
        self._buffer = b""
        while more := self.more():
            data += more
        return data


def ask(address: Address, data: Iterable[bytes], *, has_body: bool = True) -> tuple[int, bytes]:
    """Status and body of the first answer on a connection of its own."""
    with RawClient(address) as client:
        client.send(*data)
        status, _, body = client.answer(has_body=has_body)
        return status, body
