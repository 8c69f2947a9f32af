"""The connections of the HTTP port: how many there may be, and how long each may say nothing.

Nothing that a client leaves undone may hold a place for ever: half a request line, a body that is
refused and goes on, an answer that nobody reads. Where all places are taken, whoever waits for
nothing gives way, the longest idle first; where nobody does, who comes is told to come again.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from control_plane.http.errors import HttpRefusal, error_object
from control_plane.metrics.visits import note_error

HEAD_PATIENCE_S = 20.0
"""From the first byte of a request, or from the beginning of its connection, to its last header."""

REST_PATIENCE_S = 10.0
"""For the rest of a body whose request is answered already: it is read, so that its client, who
still writes, finds the answer, and forgotten."""

MAX_CONNECTIONS = 16_384
NUM_SPARE = 512
"""Connections beyond those, which are told to come again; more are closed without a word."""


class Connections:
    """Those of one port. `limit`: how many may be there at once; `refuse`: answers all others."""

    def __init__(self, limit: int, refuse: ASGIApp) -> None:
        self.limit = limit
        self.refuse = refuse
        # The longest idle first.
        self._idle: dict[PatientProtocol, None] = {}

    def protocol(self) -> type[PatientProtocol]:
        """Return the protocol of a connection that belongs here."""
        return type("PatientProtocol", (PatientProtocol,), {"crowd": self})

    def note_idle(self, connection: PatientProtocol) -> None:
        """Note that a connection serves no request any more."""
        self._idle.setdefault(connection)

    def note_busy(self, connection: PatientProtocol) -> None:
        """Note that a connection serves a request, or is gone."""
        self._idle.pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that is idle the longest; whether there was one."""
        for connection in self._idle:
            connection.give_up()
            self.note_busy(connection)
            return True
        return False


class PatientProtocol(H11Protocol):
    """One connection; its requests are served by uvicorn."""

    crowd: Connections
    _patience: asyncio.TimerHandle | None = None

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; where there is none, make one, or refuse what will be asked."""
        super().connection_made(transport)
        surplus = len(self.connections) - self.crowd.limit
        if surplus > 0 and not self.crowd.make_room():
            if surplus > NUM_SPARE:
                transport.abort()
                return
            self.app = self.crowd.refuse
        self.crowd.note_idle(self)
        self._wait_for(HEAD_PATIENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._stop_waiting()
        self._unset_keepalive_if_required()  # uvicorn does it for those that end in order
        self.crowd.note_busy(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; bytes without a request after them are waited for, and not for ever."""
        super().data_received(data)
        if self._is_serving:
            self.crowd.note_busy(self)
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._wait_as_it_is()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        if self.transport.is_closing() or self._is_serving:
            return
        self.crowd.note_idle(self)
        # Who waits for a 100 will not send the body that he was refused for, or will he?
        if self.conn.their_state is h11.SEND_BODY and _expects_100(self.headers):
            self.transport.close()
        else:
            self._wait_as_it_is()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP as OpenAI would, if it may still be answered, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_refusal(HTTPStatus.BAD_REQUEST, msg, "invalid_http")
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that nobody uses."""
        self.give_up()

    def give_up(self) -> None:
        """Close the connection, at once where the client does not even read what was written."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _wait_as_it_is(self) -> None:
        """Wait for what may come now: a next request, the rest of a head, or that of a body."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._stop_waiting()
            if self.timeout_keep_alive_task is None:  # the end of a refused body takes it away
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif self._patience is None:
            is_body = self.conn.their_state is h11.SEND_BODY
            self._wait_for(REST_PATIENCE_S if is_body else HEAD_PATIENCE_S)

    def _wait_for(self, seconds: float) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(seconds, self._lose_patience)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"The head of the request did not come within {HEAD_PATIENCE_S:g} s."
            self._write_refusal(HTTPStatus.REQUEST_TIMEOUT, message, "request_timeout")
        self.give_up()

    def _write_refusal(self, status: int, message: str, code: str) -> None:
        data = json.dumps({"error": error_object(status, message, code=code)}).encode()
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(data)).encode()),
            (b"connection", b"close"),
        ]
        reason = HTTPStatus(status).phrase.encode()
        events: list[Any] = [
            h11.Response(status_code=int(status), headers=headers, reason=reason),
            h11.Data(data=data),
            h11.EndOfMessage(),
        ]
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503 on a connection for which there is no place (an ASGI application)."""
    failure = HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "All connections that this server may have are in use.",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    ).failure
    note_error(failure.reason)
    await failure.to_response()(scope, receive, send)


def _expects_100(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"expect" for name, _ in headers)
