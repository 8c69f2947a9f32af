"""TLS of the HTTP port: a connection has its place before it has shaken hands.

uvicorn's connections begin when the handshake is over, which a client may draw out for a minute; as
many as there are descriptors could wait there, seen by nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import structlog

from control_plane.http.places import Connections

HANDSHAKE_PATIENCE_S = 10.0

PAUSE_S = 0.1
"""After an accept that failed: there are no descriptors left, most likely."""

_log = structlog.get_logger(__name__)


class TlsDoor:
    """Accepts the connections of a listening socket and shakes hands with their clients.

    `make`: makes what serves one. `num_connections`: how many of these there are.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        crowd: Connections,
        *,
        make: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
    ) -> None:
        self._listener = listener
        self._context = context
        self._crowd = crowd
        self._make = make
        self._num_connections = num_connections
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    _log.warning("a connection cannot be accepted", error=str(error))
                    await asyncio.sleep(PAUSE_S)
                    continue
                task = loop.create_task(self._shake(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._crowd.note_shaking(task)
                if self._crowd.is_overrun(self._num_connections()):
                    task.cancel()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _shake(self, connection: socket.socket) -> None:
        """Shake hands; what serves the connection is told of it then, and of nothing else."""
        loop = asyncio.get_running_loop()

        try:
            # The client may be late, or gone, or speak no TLS.
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(
                    self._make,
                    connection,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_PATIENCE_S,
                )
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._crowd.note_shaken(task)
