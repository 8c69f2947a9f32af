"""The composition root: puts the process together, serves, and takes it apart again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from control_plane.access.keyring import Keyring
from control_plane.api.server import GrpcServer
from control_plane.config import COMPUTE_TLS_PREFIX, ControlPlaneConfig, service_manager
from control_plane.engine.admission import Admission
from control_plane.engine.bring_up import ConnectedPlane
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.fleet import Fleet
from control_plane.engine.frontend import EngineFrontend, EngineParts
from control_plane.engine.gate import Gate
from control_plane.engine.loop import LoopOptions
from control_plane.engine.plugins import CoreFactories
from control_plane.engine.recording import Recorder
from control_plane.engine.roster import Attach, Roster, RosterOptions
from control_plane.engine.stream_hub import StreamHub
from control_plane.engine.template_choice import Chosen, TemplateChoice
from control_plane.http.server import EXTRA, HttpServer, missing_packages
from control_plane.metrics.instruments import Instruments
from control_plane.shutdown import Shutdown
from control_plane.text.answers.recognition import AnswerFormats
from control_plane.tracing.provider import load_tracing
from planes.errors import ConfigError, EngineError
from planes.extras import the_extra
from planes.hang_up import has_terminal
from planes.ready import announce_ready, watch_lifeline
from planes.tls import ClientTls, ServerTls

EXIT_OK = 0
EXIT_FAULT = 1

ENGINE_STOP_PATIENCE_S = 5.0

_log = structlog.get_logger(__name__)


class ControlPlane:
    """One control plane process: gRPC server on the event loop, engine on its thread.

    Lives on one event loop; `run` serves until a signal, the parent's end or a fault. Raises
    ConfigError for a scheduler or KV cache manager that cannot be imported, for a recording that
    cannot be written, and for spans without what writes them.
    """

    def __init__(self, config: ControlPlaneConfig) -> None:
        self._config = config
        self._template = TemplateChoice(
            config.chat_template,
            config.chat_template_kwargs,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        self._factories = CoreFactories.load(config.scheduler, config.kv_cache_manager)
        self._tls = None if config.tls_files is None else ServerTls(config.tls_files)
        self._keyring = None if config.api_tokens is None else Keyring(Path(config.api_tokens))
        self._instruments = Instruments(
            load_tracing(config.otlp_traces_endpoint),
            repeats_vllm=config.metrics_compat is not None,
        )
        self._loop = asyncio.get_running_loop()
        self._gate = Gate()
        self._grpc = GrpcServer(
            self._gate,
            max_model_len=config.max_model_len,
            tls=self._tls,
            keyring=self._keyring,
            visits=self._instruments.visits,
        )
        self._recorder = None if config.record is None else Recorder(config.record)
        self._hub = StreamHub(self._loop)
        self._fleet = Fleet(
            self._hub.publish,
            is_alone=len(config.compute_addresses) == 1,
            allow_numerics_change=config.allow_numerics_change,
            call_soon=self._call_soon,
            on_link_change=self._set_linked,
        )
        self._roster = self._make_roster()
        self._shutdown = Shutdown(self._hub, timeout_s=config.shutdown_timeout)
        self._health_task: asyncio.Future[None] | None = None
        self._fault: BaseException | None = None
        self._is_announced = False
        self._http = self._make_http()
        self._manager = service_manager()
        self._address = ""

    def _make_roster(self) -> Roster:
        """Return what brings the compute planes up, and an engine for each."""
        config = self._config
        controller = f"{socket.gethostname()}:{os.getpid()}"
        files = config.compute_tls_files
        compute_tls = None if files is None else ClientTls(files, prefix=COMPUTE_TLS_PREFIX)
        return Roster(
            [
                ComputeClient(
                    address, controller=controller, recorder=self._recorder, tls=compute_tls
                )
                for address in config.compute_addresses
            ],
            self._fleet,
            RosterOptions(
                limits=config,
                loop=LoopOptions(
                    pipeline_depth=config.pipeline_depth,
                    max_queued_requests=config.max_queued_requests,
                    compute_grace_s=config.compute_grace,
                ),
                factories=self._factories,
            ),
            prepare=self._prepare,
            on_fault=self._on_fault,
        )

    def _make_http(self) -> HttpServer | None:
        """Take the HTTP port, if there is to be one. Raises ConfigError if it cannot be had."""
        address = self._config.http_address
        if address is None:
            return None
        missing = missing_packages()
        if not missing:
            return HttpServer(
                address,
                self._gate,
                load_metrics=self._instruments.page(lambda: self._fleet.members),
                visits=self._instruments.visits,
                tls=self._tls,
                keyring=self._keyring,
                cors_origins=self._config.cors_origins,
            )
        why = f"the HTTP port needs {' and '.join(missing)}, of {the_extra(EXTRA)}"
        if self._config.http_port is not None:
            raise ConfigError(f"http_port: {why}", field="http_port")
        _log.warning("no HTTP port", reason=why)
        return None

    async def run(self) -> int:
        """Serve; return the exit code.

        Raises ConfigError if the address cannot be had, or this configuration cannot work with the
        compute plane that is there.
        """
        config = self._config
        self._address = await self._grpc.start(config.listen_address, flag=config.listen_flag)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._shutdown.on_signal)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hang_up)
        on_parent_gone = self._shutdown.on_parent_gone
        watch_lifeline(self._config.lifeline_fd, lambda: self._call_soon(on_parent_gone))
        self._manager.ready(f"listening on {self._address}")
        watchdog = asyncio.create_task(self._feed_watchdog())
        self._roster.start()
        if self._http is not None:
            await self._http.start()
        await self._shutdown.wait()
        self._manager.stopping()
        watchdog.cancel()
        await self._shut_down()
        if isinstance(self._fault, ConfigError) and not self._is_announced:
            raise self._fault  # the caller's, who has been told nothing else yet
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

    def _prepare(self, connected: ConnectedPlane) -> Attach:
        """Try the chat template out, off the event loop; return what attaches the plane."""
        chosen = self._template.make(connected)
        formats = self._template.formats(connected, chosen.template)
        return partial(self._attach, connected, chosen, formats)

    def _attach(
        self,
        connected: ConnectedPlane,
        chosen: Chosen,
        formats: AnswerFormats | None,
        admission: Admission,
    ) -> None:
        """Begin to take requests: the first compute plane is there."""
        frontend = EngineFrontend(
            EngineParts(
                plane=connected.plane,
                tokenizer=connected.tokenizer,
                admission=admission,
                grammars=connected.make_grammars(),
                inbox=self._fleet,
                hub=self._hub,
                gate=self._gate,
                wants_principal=self._keyring is not None,
                metrics=self._fleet.metrics,
                memory_stats=self._fleet.memory_stats,
                max_queued_requests=self._config.max_queued_requests,
                num_planes=len(self._config.compute_addresses),
                chat_template=chosen.template,
                why_no_chat=chosen.why_none,
                answer_formats=formats,
                max_unread_tokens=self._config.max_unread_tokens,
                on_drain=self._tell_health,
                watch=self._instruments.watch(*connected.plane.models),
                pooling=self._config.pooling,
                text_end=connected.text_end,
            )
        )
        self._grpc.attach(frontend)
        if self._http is not None:
            self._http.attach(frontend)
        # What is alive now stays: a collection in the middle of a step need not look at it.
        gc.collect()
        gc.freeze()

    async def _feed_watchdog(self) -> None:
        """Tell the service manager that event loop and engine turn, as often as it wants."""
        pause_s = self._manager.feed_pause_s
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            if self._roster.has_turned():
                self._manager.notify("WATCHDOG=1")

    def _on_hang_up(self) -> None:
        if has_terminal():
            self._shutdown.on_signal()  # it is gone
        elif self._keyring is not None:
            self._keyring.refresh()

    # --- what the engine thread reports ---

    def _on_fault(self, fault: BaseException) -> None:
        self._call_soon(lambda: self._stop_on(fault))

    def _call_soon(self, action: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            # The event loop is closed: the process ends, there is nobody left to tell.
            if not self._loop.is_closed():
                raise

    def _set_linked(self, is_linked: bool) -> None:
        self._shutdown.set_linked(is_linked=is_linked)
        self._gate.set_linked(is_linked=is_linked)
        self._tell_health()

    def _stop_on(self, fault: BaseException) -> None:
        if self._fault is None:
            self._fault = fault
        self._gate.stop(fault)
        self._shutdown.begin()

    def _tell_health(self) -> None:
        self._health_task = asyncio.ensure_future(self._publish_health())

    async def _publish_health(self) -> None:
        """Tell watchers and checkers what the gate says; announce the first time it serves."""
        await self._grpc.publish_health()
        if self._gate.is_serving and not self._is_announced:
            self._is_announced = True
            _log.info("serving", address=self._address)
            http = None if self._http is None else str(self._http.address)
            announce_ready(self._config.ready_fd, self._address, http)

    # --- down ---

    async def _shut_down(self) -> None:
        """Refuse new requests at once, let running ones finish, then close everything."""
        self._gate.drain()
        await self._publish_health()
        self._roster.stop_connecting()
        num_running = len(self._hub)
        if num_running and self._fault is None:
            _log.info(
                f"shutting down: waiting for requests, {self._config.shutdown_timeout:g} s at "
                "most; a second signal (Ctrl-C) ends them",
                requests_running=num_running,
            )
        else:
            _log.info("shutting down", requests_running=num_running)
        if self._fault is None:
            await self._shutdown.wait_for_requests()
        await self._roster.stop(ENGINE_STOP_PATIENCE_S)
        if self._http is not None:
            await self._http.stop()
        await self._grpc.stop()
        await self._roster.shut_down(ENGINE_STOP_PATIENCE_S)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._instruments.close)
