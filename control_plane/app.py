"""The composition root: puts the process together, serves, and takes it apart again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import replace

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as aio_health  # type: ignore[attr-defined] # not in stubs
from grpc_reflection.v1alpha import reflection

from control_plane.api.inference_servicer import SERVICE, InferenceServicer
from control_plane.api.interceptors import RequestInterceptor
from control_plane.config import ControlPlaneConfig, service_manager
from control_plane.engine.bring_up import ConnectedPlane, connect, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.frontend import EngineFrontend, EngineParts
from control_plane.engine.gate import Gate
from control_plane.engine.loop import LoopOptions
from control_plane.engine.plugins import CoreFactories
from control_plane.engine.streams import StreamHub
from control_plane.engine.thread import EngineThread
from planes.address import Address
from planes.errors import ConfigError, EngineError
from planes.ready import announce_ready, watch_lifeline
from planes.transport import client_server_options
from protos.hetero.inference.v1 import inference_pb2_grpc

EXIT_OK = 0
EXIT_FAULT = 1

STATUS_GRACE_S = 1.0
"""After the last request: time for clients to read its end, before connections are cut."""

ENGINE_STOP_PATIENCE_S = 5.0

LINK_PATIENCE_S = 1.0
"""A drain waits no longer for a compute plane that is away: it ends as well, most likely."""

ORPHAN_DRAIN_S = 2.0
"""A drain without a parent: nobody would end it if it hung, and its port is wanted again."""

_log = structlog.get_logger(__name__)


class ControlPlane:
    """One control plane process: gRPC server on the event loop, engine on its thread.

    Lives on one event loop; `run` serves until a signal, the parent's end or a fault. Raises
    ConfigError for a scheduler or KV cache manager that cannot be imported.
    """

    def __init__(self, config: ControlPlaneConfig) -> None:
        self._config = config
        self._factories = CoreFactories.load(config.scheduler, config.kv_cache_manager)
        self._loop = asyncio.get_running_loop()
        self._gate = Gate()
        self._health = aio_health.HealthServicer()
        self._servicer = InferenceServicer()
        self._client = ComputeClient(
            config.compute_address, controller=f"{socket.gethostname()}:{os.getpid()}"
        )
        self._hub = StreamHub(self._loop)
        self._engine: EngineThread | None = None
        self._bring_up: asyncio.Task[None] | None = None
        self._stop_connecting = threading.Event()
        self._ended = asyncio.Event()
        self._hurry = asyncio.Event()
        self._link_up = asyncio.Event()
        self._link_down = asyncio.Event()  # neither before the first session
        self._health_task: asyncio.Future[None] | None = None
        self._fault: BaseException | None = None
        self._is_announced = False
        self._manager = service_manager()
        self._address = ""

    async def run(self) -> int:
        """Serve; return the exit code. Raises ConfigError if the address cannot be had."""
        server = await self._start_server()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        watch_lifeline(self._config.lifeline_fd, lambda: self._call_soon(self._on_parent_gone))
        self._manager.ready(f"listening on {self._address}")
        watchdog = asyncio.create_task(self._feed_watchdog())
        self._bring_up = asyncio.create_task(self._start_engine())
        self._bring_up.add_done_callback(self._note_bring_up)
        await self._ended.wait()
        self._manager.stopping()
        watchdog.cancel()
        await self._shut_down(server)
        if self._fault is not None:
            is_known = isinstance(self._fault, EngineError)
            _log.critical(
                "control plane ends on a fault",
                error=str(self._fault),
                exc_info=None if is_known else self._fault,
            )
            return EXIT_FAULT
        _log.info("stopped")
        return EXIT_OK

    # --- up ---

    async def _start_server(self) -> grpc.aio.Server:
        """Open the port, NOT_SERVING until there is an engine."""
        server = grpc.aio.server(
            options=client_server_options(), interceptors=[RequestInterceptor(SERVICE)]
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server
        )
        await self._publish_health()
        self._address = _bind(server, self._config.listen_address)
        await server.start()
        _log.info("listening", address=self._address)
        return server

    async def _start_engine(self) -> None:
        """Wait for the compute plane, then start the engine on it."""
        connected = await asyncio.to_thread(
            connect, self._client, self._config, stop=self._stop_connecting
        )
        if connected is None:
            return
        config = self._config
        loop = make_loop(
            self._client,
            connected,
            self._hub.publish,
            options=LoopOptions(
                pipeline_depth=config.pipeline_depth,
                max_queued_requests=config.max_queued_requests,
                compute_grace_s=config.compute_grace,
            ),
            factories=self._factories,
            on_link_change=self._on_link_change,
        )
        self._servicer.attach(
            EngineFrontend(
                EngineParts(
                    plane=connected.plane,
                    tokenizer=connected.tokenizer,
                    admission=connected.make_admission(),
                    inbox=loop.inbox,
                    hub=self._hub,
                    gate=self._gate,
                    metrics=lambda: loop.metrics,
                    memory_stats=lambda: loop.memory_stats,
                )
            )
        )
        _log_plane(connected)
        # What is alive now stays: a collection in the middle of a step need not look at it.
        gc.collect()
        gc.freeze()
        self._engine = EngineThread(loop, on_fault=self._on_fault)
        self._engine.start()

    async def _feed_watchdog(self) -> None:
        """Tell the service manager that event loop and engine turn, as often as it wants."""
        pause_s = self._manager.feed_pause_s
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            if self._engine is None or self._engine.has_turned():
                self._manager.notify("WATCHDOG=1")

    def _note_bring_up(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        # Once the end has begun, the connection is taken away from under it.
        if error is not None and not self._ended.is_set():
            self._stop_on(error)

    # --- what the engine thread reports ---

    def _on_link_change(self, is_linked: bool) -> None:
        self._call_soon(lambda: self._set_linked(is_linked=is_linked))

    def _on_fault(self, fault: BaseException) -> None:
        self._call_soon(lambda: self._stop_on(fault))

    def _call_soon(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            # The event loop is closed: the process ends, there is nobody left to tell.
            if not self._loop.is_closed():
                raise

    def _set_linked(self, *, is_linked: bool) -> None:
        here, gone = self._link_up, self._link_down
        (here if is_linked else gone).set()
        (gone if is_linked else here).clear()
        self._gate.set_linked(is_linked=is_linked)
        self._health_task = asyncio.ensure_future(self._publish_health())

    def _stop_on(self, fault: BaseException) -> None:
        if self._fault is None:
            self._fault = fault
        self._gate.stop()
        self._ended.set()

    async def _publish_health(self) -> None:
        """Tell watchers and checkers what the gate says; announce the first time it serves."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if self._gate.is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for service in ("", SERVICE):
            await self._health.set(service, status)
        if self._gate.is_serving and not self._is_announced:
            self._is_announced = True
            _log.info("serving", address=self._address)
            announce_ready(self._config.ready_fd, self._address)

    # --- down ---

    def _on_signal(self) -> None:
        """Begin to shut down; a second signal cuts the waiting short."""
        if self._ended.is_set():
            self._hurry.set()
        self._ended.set()

    def _on_parent_gone(self) -> None:
        """Begin to shut down, and be quick about it even if a signal came before."""
        _log.warning("the parent process is gone")
        self._ended.set()
        self._loop.call_later(ORPHAN_DRAIN_S, self._hurry.set)

    async def _shut_down(self, server: grpc.aio.Server) -> None:
        """Refuse new requests at once, let running ones finish, then close everything."""
        self._gate.drain()
        await self._publish_health()
        self._stop_connecting.set()
        _log.info("shutting down", requests_running=len(self._hub))
        if self._fault is None:
            await self._wait_for_requests()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop, ENGINE_STOP_PATIENCE_S)
        await server.stop(STATUS_GRACE_S)
        if self._bring_up is not None:
            await asyncio.wait([self._bring_up], timeout=ENGINE_STOP_PATIENCE_S)
        self._client.shut_down()

    async def _wait_for_requests(self) -> None:
        """Wait until no request runs, at most `shutdown_timeout`, unless told to hurry.

        Requests cannot go on without a compute plane: when it is away, it gets a moment only.
        """
        lost = asyncio.create_task(self._wait_for_lost_plane())
        waits = [
            asyncio.create_task(self._hub.wait_until_idle()),
            asyncio.create_task(self._hurry.wait()),
            lost,
        ]
        try:
            done, _ = await asyncio.wait(
                waits,
                timeout=self._config.shutdown_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for wait in waits:
                wait.cancel()
        if len(self._hub) == 0:
            return
        if lost in done:
            reason = "the compute plane is away"
        elif done:
            reason = "a second signal, or the parent process is gone"
        else:
            reason = f"shutdown_timeout of {self._config.shutdown_timeout:g} s"
        _log.warning("requests cut off by the shutdown", requests=len(self._hub), reason=reason)

    async def _wait_for_lost_plane(self) -> None:
        """Return once the compute plane has been away for LINK_PATIENCE_S in one piece."""
        while True:
            await self._link_down.wait()
            try:
                await asyncio.wait_for(self._link_up.wait(), LINK_PATIENCE_S)
            except TimeoutError:
                return


def _bind(server: grpc.aio.Server, address: Address) -> str:
    """Take the address; return it with the port that was given. Raises ConfigError."""
    if address.path is not None:
        _check_socket_is_dead(address.path)
    try:
        port = server.add_insecure_port(address.target)
    except RuntimeError:
        raise ConfigError(
            f"cannot listen on {address}: it is in use, or not an address of this machine",
            field="listen",
        ) from None
    return str(address if address.path is not None else replace(address, port=port))


def _check_socket_is_dead(path: str) -> None:
    """Raise ConfigError if a process listens on the socket file, or the file is no socket.

    gRPC would take the file from under the other server's feet without a word.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"cannot listen on unix:{path}: the file exists", field="listen")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        raise ConfigError(
            f"cannot listen on unix:{path}: {error.strerror}", field="listen"
        ) from None
    raise ConfigError(f"cannot listen on unix:{path}: it is in use", field="listen")


def _log_plane(connected: ConnectedPlane) -> None:
    plane, limits = connected.plane, connected.limits
    _log.info(
        "compute plane connected",
        model=plane.model,
        executor=plane.executor,
        device=plane.device,
        dtype=plane.dtype,
        num_blocks=plane.num_blocks,
        block_size=plane.block_size,
        num_host_blocks=limits.num_host_blocks,
        prefix_cache=connected.prefix_cache,
        max_model_len=limits.max_model_len,
        max_batch_size=limits.max_batch_size,
    )
