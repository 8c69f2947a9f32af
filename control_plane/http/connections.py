"""A connection of the HTTP port: how long it may say nothing, and how much it may say at once.

Nothing that a client leaves undone may hold a place for ever: half a request line, a body that is
refused and goes on, an answer that nobody reads. What it sends is taken in a little at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any, cast

import h11
import structlog
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from control_plane.http.errors import error_object
from control_plane.http.parser import MeteredParser
from control_plane.http.places import Connections
from control_plane.http.transport import WatchedTransport
from control_plane.metrics.visits import HTTP

HEAD_PATIENCE_S = 20.0
"""From the first byte of a request, or from the beginning of its connection, to its last header."""

REST_PATIENCE_S = 10.0
"""For the rest of a body whose request is answered already: it is read, so that its client, who
still writes, finds the answer, and forgotten."""

AHEAD_PATIENCE_S = 10.0
"""For the answer to a request behind which more is waiting than we take in: while nothing is read,
nobody notices that the client has left."""

SLICE_BYTES = 4 << 10
"""Handed to the parser at a time, where it is not one piece of a body."""

MAX_AHEAD_BYTES = 64 << 10
"""Waiting for the parser. What one read brings may be more; then nothing is read for a while."""

_log = structlog.get_logger(__name__)

# uvicorn warns of everything that is wrong with a request: clients could fill the log with it.
_faults_only = logging.getLogger("uvicorn.error.connections")
_faults_only.setLevel(logging.ERROR)


class _Flow(FlowControl):
    """uvicorn's wish to read or not to read a body."""

    def __init__(self, connection: PatientProtocol) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def pause_reading(self) -> None:
        # Behind a whole request it would not hear of its client's end any more.
        if self._connection.conn.their_state is h11.SEND_BODY:
            self.read_paused = True
            self._connection.regulate()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._connection.regulate()


class PatientProtocol(H11Protocol):
    """One connection; its requests are served by uvicorn."""

    crowd: Connections
    conn: MeteredParser
    _patience: asyncio.TimerHandle | None = None
    _ahead: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*args, **kwargs)
        self.logger = _faults_only
        self.conn = MeteredParser()
        self._serving_app = self.app
        self.app = self._serve
        self._inbox = bytearray()

    @property
    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_work(self) -> bool:
        """Whether there are bytes that may be parsed now."""
        return (
            not self.transport.is_closing()
            and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            and not self.flow.read_paused
            and (bool(self._inbox) or self.conn.is_spent)
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; where there is none, make one, or refuse what will be asked."""
        self._watched = WatchedTransport(transport, self.loop, self._note_closing)
        super().connection_made(cast(asyncio.Transport, self._watched))
        self.flow = _Flow(self)
        surplus = self.crowd.surplus(len(self.connections))
        if surplus > 0 and not self.crowd.make_room():
            if surplus > self.crowd.num_spare:
                transport.abort()
                return
            self._serving_app = self.crowd.refuse
        self.crowd.note_idle(self)
        self._wait_for(HEAD_PATIENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the place."""
        self._stop_waiting()
        self._stop_looking_ahead()
        self._watched.forget()
        self._unset_keepalive_if_required()  # uvicorn does it for those that end in order
        self._inbox.clear()
        super().connection_lost(exc)
        self.crowd.note_gone(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; bytes without a request after them are waited for, and not for ever."""
        self._unset_keepalive_if_required()
        self._inbox += data
        if not self.crowd.is_queued(self):
            self.take_turn()
        self.regulate()

    def take_turn(self) -> None:
        """Parse some of the bytes that are there."""
        self.conn.refill()
        self.handle_events_if_any()
        while self.has_work and not self.conn.is_spent:
            size = max(SLICE_BYTES, self.conn.num_body_bytes_left)
            self.conn.receive_data(bytes(self._inbox[:size]))
            del self._inbox[:size]
            self.handle_events_if_any()
        if self._is_serving:
            self.crowd.note_busy(self)
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._wait_as_it_is()

    def handle_events_if_any(self) -> None:
        """Serve what the parser has, unless it is what comes after an answer."""
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.handle_events()

    def regulate(self) -> None:
        """Read on, or do not, as there is room for bytes; go on with those that are there."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.MUST_CLOSE:
            self._inbox.clear()  # nobody will ever answer that
        is_full = len(self._inbox) > MAX_AHEAD_BYTES
        if is_full or self.flow.read_paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        if self.has_work:
            self.crowd.queue(self)
        if is_full and self._ahead is None and self._is_serving:
            self._ahead = self.loop.call_later(AHEAD_PATIENCE_S, self._look_ahead)

    def pause_writing(self) -> None:
        """Wait for the client to read some of what was written, and not for ever."""
        super().pause_writing()
        self._watched.watch()

    def resume_writing(self) -> None:
        """Write on."""
        self._watched.unwatch()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        self._stop_looking_ahead()
        self.conn.refill()
        super().on_response_complete()
        if self.transport.is_closing() or self._is_serving:
            self.regulate()
            return
        self.crowd.note_idle(self)
        # Who waits for a 100 will not send the body that he was refused for, or will he?
        if self.conn.their_state is h11.SEND_BODY and _expects_100(self.headers):
            self.transport.close()
            return
        self._wait_as_it_is()
        self.regulate()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the parser knows better
        """Answer what is no HTTP as OpenAI would, if it may still be answered, and close."""
        status, message, code = self.conn.refusal
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_refusal(status, message, code)
        else:
            self._note_refusal(message, code)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that nobody uses."""
        self.give_up()

    def cut(self) -> None:
        """End the connection at once."""
        self._watched.abort()

    def give_up(self) -> None:
        """Close the connection, at once where the client does not even read what was written."""
        if self.transport.get_write_buffer_size():
            self.cut()
        else:
            self.transport.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; whoever leaves its answer unfinished has said why, or nobody listens."""
        cycle = self.cycle
        await self._serving_app(scope, receive, send)
        if cycle.response_started and not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True  # or else uvicorn takes it for a fault of ours
            self.transport.close()

    def _note_closing(self) -> None:
        self._inbox.clear()
        if self._serving_app is self.crowd.refuse:
            self.crowd.note_gone(self)  # it has no place that it could give to others
        else:
            self.crowd.note_closing(self)

    def _look_ahead(self) -> None:
        self._ahead = None
        if len(self._inbox) > MAX_AHEAD_BYTES:
            self.cut()

    def _stop_looking_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def _wait_as_it_is(self) -> None:
        """Wait for what may come now: a next request, the rest of a head, or that of a body."""
        has_bytes = self.conn.trailing_data[0] or self._inbox
        if self.conn.their_state is h11.IDLE and not has_bytes:
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

    def _note_refusal(self, message: str, code: str) -> None:
        self.crowd.visits.num_errors[HTTP, code.upper()] += 1
        _log.debug("http connection refused", error=message)

    def _write_refusal(self, status: int, message: str, code: str) -> None:
        self._note_refusal(message, code)
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


def _expects_100(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"expect" for name, _ in headers)


def protocol_of(crowd: Connections) -> type[PatientProtocol]:
    """Return the protocol of the connections of a port."""
    return type("PatientProtocol", (PatientProtocol,), {"crowd": crowd})
