"""The plane's gRPC server: services, health, reflection, and the socket they are found at."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from compute_plane.errors import ListenError
from compute_plane.rpc.servicer import MAX_STREAMS, ComputeServicer
from planes.address import Address
from planes.errors import ConfigError
from planes.listening import check_can_listen
from planes.socket_file import SocketFile
from planes.tls import ServerTls, add_port
from planes.transport import plane_server_options
from protos.hetero.compute.v1 import compute_pb2, compute_pb2_grpc

SERVICE: Final = compute_pb2.DESCRIPTOR.services_by_name["ComputeService"].full_name
HEALTH_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

MAX_REFLECTION_STREAMS: Final = 4
"""Tools that look around at once; some keep their stream open."""

NUM_WORKERS: Final = MAX_STREAMS + MAX_REFLECTION_STREAMS + 8
"""Threads that run RPCs; each Execute and each reflection stream holds one."""

OWNER_ONLY: Final = 0o177
"""The umask that leaves a socket with mode 0600 from its first moment."""
OWNER_AND_GROUP: Final = 0o117
"""The umask that leaves it with mode 0660."""
GROUP_MAY_NOT_WRITE: Final = 0o020
"""This bit of the process's umask decides which: connecting takes the right to write."""

STOP_GRACE_S: Final = 0.5
"""What calls still open at the end get (health watchers stay until they are cut)."""


class BoundedReflection:
    """Server reflection that leaves worker threads for the other calls."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._unbounded: Any = reflection.ReflectionServicer(service_names)  # its stub is wrong
        self._room = threading.Semaphore(MAX_REFLECTION_STREAMS)

    def ServerReflectionInfo(  # noqa: N802 - the name of the RPC
        self,
        request_iterator: Iterator[reflection_pb2.ServerReflectionRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[reflection_pb2.ServerReflectionResponse]:
        """Answer as gRPC's own servicer does, or with RESOURCE_EXHAUSTED."""
        if not self._room.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"at most {MAX_REFLECTION_STREAMS} reflection streams are served at once",
            )
        try:
            yield from self._unbounded.ServerReflectionInfo(request_iterator, context)
        finally:
            self._room.release()


class PlaneServer:
    """Serves one compute plane. Raises ListenError from `start` if the address cannot be had."""

    def __init__(
        self, servicer: ComputeServicer, address: Address, tls: ServerTls | None = None
    ) -> None:
        self._wanted = address
        self._tls = tls
        self._health = health.HealthServicer()
        self._socket_file: SocketFile | None = None  # before `start`
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="rpc"),
            options=plane_server_options(),
        )
        compute_pb2_grpc.add_ComputeServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            BoundedReflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)), self._server
        )

    def start(self) -> Address:
        """Listen and serve; the address with the real port."""
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        address = self._bind()
        self._server.start()
        return address

    def refuse_traffic(self) -> None:
        """Report NOT_SERVING from now on."""
        self._health.enter_graceful_shutdown()

    def stop(self) -> None:
        """End all calls and close the socket."""
        with self._socket_file.going() if self._socket_file else contextlib.nullcontext():
            self._server.stop(STOP_GRACE_S).wait()

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE):
            self._health.set(service, status)

    def _bind(self) -> Address:
        address = self._wanted
        check_address(address)
        if address.path is not None:
            before = os.umask(OWNER_ONLY)
            try:
                if not before & GROUP_MAY_NOT_WRITE:
                    os.umask(OWNER_AND_GROUP)
                self._add_port(address)
            finally:
                os.umask(before)
            self._socket_file = SocketFile(address)
            return address
        return Address(host=address.host, port=self._add_port(address))

    def _add_port(self, address: Address) -> int:
        try:
            return add_port(self._server, address, self._tls)
        except RuntimeError as error:
            raise ListenError(f"listen: cannot bind {address}: {error}", field="listen") from None


def check_address(address: Address) -> None:
    """Raise ListenError if an address cannot be had: better before a model is loaded than after."""
    try:
        check_can_listen(address)
    except ConfigError as error:
        raise ListenError(error.message, field=error.field) from None
