"""The places of the HTTP port: how many connections there may be, and who gives way to others.

Where all places are taken, whoever waits for nothing gives way: first those that are to end and
whose clients do not read, then the longest idle, then the longest in its handshake. Where nobody
does, who comes is told to come again.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.http.anthropic_errors import failure_response
from control_plane.http.errors import HttpRefusal
from control_plane.metrics.visits import VisitMeter, note_error

if TYPE_CHECKING:
    from control_plane.http.connections import PatientProtocol

MAX_CONNECTIONS = 16_384
MIN_SPARE, MAX_SPARE = 16, 512
"""Connections beyond those, a sixteenth of them, which are told to come again; more are closed
without a word."""


class Connections:
    """Those of one port. `limit`: how many may be there at once; `refuse`: answers all others.

    `visits`: counts what never becomes a request.
    """

    def __init__(self, limit: int, refuse: ASGIApp, visits: VisitMeter) -> None:
        self.limit = limit
        self.num_spare = min(max(limit // 16, MIN_SPARE), MAX_SPARE)
        self.refuse = refuse
        self.visits = visits
        # The longest idle first.
        self._idle: dict[PatientProtocol, None] = {}
        self._shaking: dict[asyncio.Task[None], None] = {}
        self._closing: dict[PatientProtocol, None] = {}
        # Those that have more bytes than are taken in at once, in turn.
        self._queue: dict[PatientProtocol, None] = {}
        self._has_turns = False

    @property
    def num_closing(self) -> int:
        """How many are to end when their clients have read all."""
        return len(self._closing)

    def note_idle(self, connection: PatientProtocol) -> None:
        """Note that a connection serves no request any more."""
        self._idle.setdefault(connection)

    def note_busy(self, connection: PatientProtocol) -> None:
        """Note that a connection serves a request."""
        self._idle.pop(connection, None)

    def note_closing(self, connection: PatientProtocol) -> None:
        """Note that a connection waits for nothing but its client to read."""
        self.note_gone(connection)
        self._closing[connection] = None

    def note_gone(self, connection: PatientProtocol) -> None:
        """Note that a connection is gone."""
        for place in (self._idle, self._closing, self._queue):
            place.pop(connection, None)

    def note_shaking(self, handshake: asyncio.Task[None]) -> None:
        """Note that a connection begins with a handshake."""
        self._shaking[handshake] = None

    def note_shaken(self, handshake: asyncio.Task[None]) -> None:
        """Note that a handshake is over."""
        self._shaking.pop(handshake, None)

    def surplus(self, num_connections: int) -> int:
        """Return how many there are too many, those that shake hands besides the others."""
        return num_connections + len(self._shaking) - self.limit

    def is_overrun(self, num_connections: int) -> bool:
        """Whether there are too many even to be told so, and none gives way."""
        surplus = self.surplus(num_connections)
        return surplus > 0 and not self.make_room() and surplus > self.num_spare

    def make_room(self) -> bool:
        """End a connection that is to end, or is idle the longest; whether there was one."""
        for connection in self._closing:
            connection.cut()
            self.note_gone(connection)
            return True
        for connection in self._idle:
            connection.give_up()
            self.note_gone(connection)  # nobody else gets the same place
            return True
        if len(self._shaking) > 1:  # the last one is who comes
            handshake = next(iter(self._shaking))
            handshake.cancel()
            self.note_shaken(handshake)
            return True
        return False

    def queue(self, connection: PatientProtocol) -> None:
        """Let a connection take its bytes in when it is its turn: one at each of the loop's."""
        self._queue.setdefault(connection)
        if not self._has_turns:
            self._has_turns = True
            connection.loop.call_soon(self._turn)

    def is_queued(self, connection: PatientProtocol) -> bool:
        """Whether a connection will have its turn."""
        return connection in self._queue

    def _turn(self) -> None:
        self._has_turns = False
        connection = next(iter(self._queue), None)
        if connection is None:
            return
        del self._queue[connection]
        connection.take_turn()
        connection.regulate()  # behind the others, if there is more
        for other in self._queue:
            self.queue(other)
            break


async def refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503 on a connection for which there is no place (an ASGI application)."""
    failure = HttpRefusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "All connections that this server may have are in use.",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    ).failure
    note_error(failure.reason)
    response = failure_response(failure, scope["path"])
    await response(scope, receive, send)
