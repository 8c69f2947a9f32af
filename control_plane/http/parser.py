"""The HTTP parser of one connection, which does a little at a time.

A client pays some bytes for work that takes us a hundred times as long: chunks of one byte, headers
of two letters. So heads are measured before they are parsed, chunks are counted, and after some
steps the parser pretends to have no more bytes: whoever drives it goes on at a later turn.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import h11

from control_plane.http.edge import MAX_HEAD_BYTES

STEPS_A_TURN = 64
"""Events that are taken from the parser at a time: 1–2 ms of chunks of one byte each."""

MAX_HEAD_LINES = 200
_CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"
"""What h11 writes in the head of an answer whose length it was not told."""

_WHOLE_URL = re.compile(rb"https?://[^/?]*+(?P<rest>.*)", re.IGNORECASE)

_MAX_RAW_HEAD_BYTES = MAX_HEAD_BYTES + 4 * MAX_HEAD_LINES + 256
"""With what stands between them: whatever `Edge` lets through, and little more."""

SMALL_CHUNK_BYTES = 64
MAX_SMALL_CHUNKS = 16_384
"""Of one body. Clients that write JSON piece by piece send some thousands; nobody sends more."""


class MeteredParser(h11.Connection):
    """The server's end of one connection.

    `is_spent`: it stopped before all was parsed; `refill` lets it go on. `num_body_bytes_left`: of
    a body whose length was told. `refusal`: status, message and code for what it did not accept.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MAX_RAW_HEAD_BYTES)
        self.is_spent = False
        self.num_body_bytes_left = 0
        self.refusal = (HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.", "invalid_http")
        self._num_steps_left = STEPS_A_TURN
        self._num_small_chunks = 0
        self._sends_chunks = False

    def refill(self) -> None:
        """Let it take as many steps as it may in one turn."""
        self._num_steps_left = STEPS_A_TURN
        self.is_spent = False

    def next_event(self) -> Any:  # noqa: ANN401 - h11 spells its sentinels as types
        """Return the next event, or NEED_DATA when enough was done for now.

        Raises h11.RemoteProtocolError for what is no HTTP or too costly.
        """
        if self._num_steps_left == 0:
            self.is_spent = True
            return h11.NEED_DATA
        self._num_steps_left -= 1
        is_head = self.their_state is h11.IDLE
        if is_head and _num_lines(self.trailing_data[0]) > MAX_HEAD_LINES:
            self._refuse_head()
            raise h11.RemoteProtocolError("too many lines")
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # It says so of chunk heads and trailers, too, which are not what that status is about.
            if is_head and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                self._refuse_head()
            raise
        if isinstance(event, h11.Request):
            event = _in_origin_form(event)
            self._num_small_chunks = 0
            self.num_body_bytes_left = _length_of(event)
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def send(self, event: Any) -> Any:  # noqa: ANN401 - as h11 has it
        """Spell an event of ours; the next piece of a chunked body without asking what it changes.

        It changes nothing, and h11 takes 4 µs to find that out.
        """
        if type(event) is h11.Data and self._sends_chunks and event.data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        spelled = super().send(event)
        if type(event) is h11.Response:
            self._sends_chunks = _CHUNKED in spelled
        elif type(event) is h11.EndOfMessage:
            self._sends_chunks = False
        return spelled

    def _count(self, piece: h11.Data) -> None:
        self.num_body_bytes_left = max(0, self.num_body_bytes_left - len(piece.data))
        self._num_small_chunks += piece.chunk_end and len(piece.data) < SMALL_CHUNK_BYTES
        if self._num_small_chunks > MAX_SMALL_CHUNKS:
            message = (
                f"The body has more than {MAX_SMALL_CHUNKS} chunks of less than "
                f"{SMALL_CHUNK_BYTES} bytes."
            )
            self.refusal = (HTTPStatus.BAD_REQUEST, message, "invalid_http")
            raise h11.RemoteProtocolError(message)

    def _refuse_head(self) -> None:
        self.refusal = (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"Path and headers have at most {MAX_HEAD_BYTES} bytes and {MAX_HEAD_LINES} lines.",
            "headers_too_large",
        )


def _num_lines(data: bytes) -> int:
    """Return how many lines a head has that begins here, as far as it is there."""
    ends = [end for end in (data.find(b"\n\r\n"), data.find(b"\n\n")) if end >= 0]
    return data.count(b"\n", 0, min(ends, default=len(data)))


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Return a request with the path for its target, where that is a whole URL.

    A server must take those (RFC 9112, section 3.2.2). Which host they name is nothing to us.
    """
    url = _WHOLE_URL.fullmatch(request.target)
    if url is None:
        return request
    rest = url["rest"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=list(request.headers),
        http_version=request.http_version,
    )


def _length_of(request: h11.Request) -> int:
    """Return the length of a request's body that its head tells, 0 where it does not."""
    headers = dict(request.headers)
    if b"transfer-encoding" in headers:
        return 0
    return int(headers.get(b"content-length", b"0"))
