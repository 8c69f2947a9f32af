"""The HTTP server in the control plane's process, if the extra is installed.

The port is taken at once; FastAPI, which takes a third of a second to import, is loaded on another
thread meanwhile. Clients that come before it wait in the socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import structlog

from control_plane.access.keyring import Keyring
from control_plane.engine.gate import Gate
from control_plane.http.backend import Backend, MetricsPage
from control_plane.metrics.visits import VisitMeter
from planes.address import Address
from planes.descriptors import share_of_descriptors
from planes.errors import ConfigError
from planes.listening import bind_port
from planes.tls import ServerTls

if TYPE_CHECKING:
    import ssl

    import uvicorn

    from control_plane.engine.frontend import EngineFrontend
    from control_plane.http.connections import PatientProtocol

NEEDED = ("fastapi", "uvicorn")
EXTRA = "http"

HTTP_SHARE = 0.6
"""Of the file descriptors; there may be a sixteenth of that more, who are told to come again. A
quarter of them is for gRPC, the rest for the process itself."""

BACKLOG = 4096
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection: who closes first must not be the server."""

CUT_OFF_AFTER_S = 1
"""At the end, for clients to read what was written."""

_log = structlog.get_logger(__name__)


def missing_packages() -> list[str]:
    """Return what is not installed of the extra."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def take_port(address: Address) -> tuple[list[socket.socket], Address]:
    """Listen at every address of a host; return the sockets, and the address with their port.

    Raises ConfigError if it is in use or not an address of this machine.
    """
    listeners: list[socket.socket] = []
    try:
        listeners = bind_port(address)
        for listener in listeners:
            listener.listen(BACKLOG)
            listener.setblocking(False)
    except (ConfigError, OSError) as error:  # OSError: somebody was quicker
        for listener in listeners:
            listener.close()
        reason = error.message.removeprefix("listen: ") if isinstance(error, ConfigError) else error
        raise ConfigError(
            f"http_port: {reason}; another one is --http-port, none --no-http", field="http_port"
        ) from None
    return listeners, replace(address, port=listeners[0].getsockname()[1])


class HttpServer:
    """The HTTP port of one control plane; lives on its event loop.

    Raises ConfigError if the port cannot be had. `load_metrics`: makes what makes the page of
    `/metrics`, on another thread; None: there is no such page. `visits`: counts requests. `tls`:
    None: plaintext. `keyring`: whose tokens clients must have; None: nobody needs one.
    `cors_origins`: of web pages that may use the port.
    """

    def __init__(
        self,
        address: Address,
        gate: Gate,
        *,
        load_metrics: Callable[[], MetricsPage] | None = None,
        visits: VisitMeter | None = None,
        tls: ServerTls | None = None,
        keyring: Keyring | None = None,
        cors_origins: Sequence[str] = (),
    ) -> None:
        self._listeners, self.address = take_port(address)
        self._tls = tls
        self._keyring = keyring
        self._cors_origins = cors_origins
        self._load_metrics = load_metrics
        self._backend = Backend(gate, visits=visits)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._doors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load what it takes, and serve from then on."""
        server = self._server = await asyncio.to_thread(self._load)
        listeners = self._listeners
        if server.config.ssl is not None:
            self._doors = [
                asyncio.create_task(self._open_door(listener, server, server.config.ssl))
                for listener in listeners
            ]
            listeners = []
        self._serving = asyncio.create_task(server.serve(listeners))
        _log.info("listening for HTTP", address=str(self.address))

    def attach(self, frontend: EngineFrontend) -> None:
        """Begin to answer requests."""
        self._backend.attach(frontend)

    async def stop(self) -> None:
        """Close the port, and cut off whoever still reads after a moment."""
        if self._server is None or self._serving is None:
            self._close_listeners()
            return
        self._server.should_exit = True
        if self._doors:
            for door in self._doors:
                door.cancel()
            await asyncio.wait(self._doors)
            self._close_listeners()
        await self._serving

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def _open_door(
        self, listener: socket.socket, server: uvicorn.Server, context: ssl.SSLContext
    ) -> None:
        """Accept connections with TLS, which uvicorn serves when they have shaken hands."""
        from control_plane.http.tls_door import TlsDoor

        protocol = cast("type[PatientProtocol]", server.config.http_protocol_class)
        state = server.server_state
        door = TlsDoor(
            listener,
            context,
            protocol.crowd,
            make=lambda: protocol(server.config, state, {}),
            num_connections=lambda: len(state.connections),
        )
        await door.run()

    def _load(self) -> uvicorn.Server:
        import uvicorn

        from control_plane.http.app import make_app
        from control_plane.http.connections import protocol_of
        from control_plane.http.edge import Edge
        from control_plane.http.places import (
            MAX_CONNECTIONS,
            Connections,
            refuse_connection,
        )

        if self._load_metrics is not None:
            self._backend.metrics = self._load_metrics()

        class Server(uvicorn.Server):
            """One that leaves the signals to the control plane."""

            @contextlib.contextmanager
            def capture_signals(self) -> Generator[None, None, None]:
                yield

        limit = share_of_descriptors(HTTP_SHARE, MAX_CONNECTIONS)
        visits = self._backend.visits
        connections = Connections(limit, Edge(refuse_connection, visits), visits)
        protocol = protocol_of(connections)
        options: dict[str, Any] = {
            "http": protocol,  # h11: the faster one takes headers of any size
            "lifespan": "off",
            "ws": "none",
            "log_config": None,
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": CUT_OFF_AFTER_S,
        }
        if self._tls is not None:
            options |= self._tls.uvicorn_arguments()
        config = uvicorn.Config(
            make_app(self._backend, self._keyring, self._cors_origins), **options
        )
        config.load()
        if self._tls is not None and config.ssl is not None:
            self._tls.keep_fresh(config.ssl)
        return Server(config)
