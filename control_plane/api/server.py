"""The gRPC server in the control plane's process: its services, their health, and its port."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as aio_health  # type: ignore[attr-defined] # not in stubs
from grpc_reflection.v1alpha import reflection

from control_plane.access.keyring import Keyring
from control_plane.api.engine_access import EngineAccess
from control_plane.api.interceptors import RequestInterceptor
from control_plane.api.services import ADMIN_SERVICES, SERVICES, add_services
from control_plane.engine.frontend import EngineFrontend
from control_plane.engine.gate import Gate
from control_plane.metrics.visits import VisitMeter
from control_plane.text.bounds import max_message_bytes
from planes.address import Address
from planes.descriptors import share_of_descriptors
from planes.errors import ConfigError
from planes.listening import check_can_listen
from planes.socket_file import SocketFile
from planes.tls import ServerTls, add_port
from planes.transport import MAX_CLIENT_MESSAGE_BYTES, client_server_options

GRPC_SHARE = 0.25
"""Of the file descriptors, for clients of gRPC. The HTTP port has more than half."""

MAX_GRPC_CONNECTIONS = 16_384

STATUS_GRACE_S = 1.0
"""After the last request: time for clients to read its end, before connections are cut."""

_log = structlog.get_logger(__name__)


class GrpcServer:
    """The gRPC port of one control plane; lives on its event loop.

    `max_model_len`: bounds messages. `tls`: None: plaintext. `keyring`: whose tokens clients must
    have; None: nobody needs one. `visits`: counts requests.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        max_model_len: int,
        tls: ServerTls | None = None,
        keyring: Keyring | None = None,
        visits: VisitMeter | None = None,
    ) -> None:
        self._gate = gate
        self._tls = tls
        self._keyring = keyring
        self._visits = visits
        self._largest = max_message_bytes(max_model_len)
        self._access = EngineAccess(gate)
        self._health = aio_health.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._socket_file: SocketFile | None = None  # before `start`

    async def start(self, address: Address, *, flag: str) -> str:
        """Open the port, NOT_SERVING until there is an engine; the address with its port.

        `flag`: what says another one. Raises ConfigError if it cannot be had.
        """
        server = self._server = self._make()
        await self.publish_health()
        found = self._bind(server, address, flag)
        self._socket_file = SocketFile(address)
        await server.start()
        _log.info("listening", address=found)
        return found

    def attach(self, frontend: EngineFrontend) -> None:
        """Begin to answer requests."""
        self._access.attach(frontend)

    async def publish_health(self) -> None:
        """Tell watchers and checkers what the gate says."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if self._gate.is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    async def stop(self) -> None:
        """Close the port, and cut off whoever still reads after a moment."""
        if self._server is not None:
            with self._socket_file.going() if self._socket_file else contextlib.nullcontext():
                await self._server.stop(STATUS_GRACE_S)

    def _make(self) -> grpc.aio.Server:
        """Return the server with all its services."""
        server = grpc.aio.server(
            # What is a little too large is told so in our words, the rest by gRPC, unread.
            options=client_server_options(
                min(2 * self._largest, MAX_CLIENT_MESSAGE_BYTES),
                max_connections=share_of_descriptors(GRPC_SHARE, MAX_GRPC_CONNECTIONS),
            ),
            interceptors=[
                RequestInterceptor(
                    *SERVICES,
                    keyring=self._keyring,
                    admin_services=ADMIN_SERVICES,
                    visits=self._visits,
                    max_message_bytes=self._largest,
                )
            ],
        )
        add_services(server, self._access)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME), server
        )
        return server

    def _bind(self, server: grpc.aio.Server, address: Address, flag: str) -> str:
        key = flag.removeprefix("--").replace("-", "_")
        try:
            check_can_listen(address, key=key)
        except ConfigError as error:
            raise ConfigError(f"{error.message}; another one is {flag}", field=key) from None
        try:
            port = add_port(server, address, self._tls)
        except RuntimeError:  # taken since then, most likely
            raise ConfigError(f"{key}: cannot listen on {address}", field=key) from None
        return str(address if address.path is not None else replace(address, port=port))
