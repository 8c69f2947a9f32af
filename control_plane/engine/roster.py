"""From the addresses of compute planes to a running fleet, and back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from control_plane.config import SchedulingLimits
from control_plane.core.interface import MovesRequests
from control_plane.engine.admission import Admission
from control_plane.engine.bring_up import QUIET_WAIT_S, ConnectedPlane, connect, make_loop
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.fleet import Fleet
from control_plane.engine.link import ComputeLink
from control_plane.engine.loop import EngineLoop, LoopOptions
from control_plane.engine.member import Member, check_same_model
from control_plane.engine.one_of_several import OneOfSeveral
from control_plane.engine.plugins import CoreFactories
from planes.errors import ConfigError, EngineError

START_S = QUIET_WAIT_S
"""A plane that comes within it and does not fit ends the process: nobody depends on it yet."""

NEXT_TRY_S = 5.0
"""Before a plane that came later and did not fit is asked again; the others serve meanwhile."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RosterOptions:
    """What every plane's engine is made with."""

    limits: SchedulingLimits
    loop: LoopOptions
    factories: CoreFactories


Attach: TypeAlias = Callable[[Admission], None]


class Roster:
    """Connects to every address, whenever a plane comes there, and takes it into the fleet.

    `prepare` is called with a plane as long as none is taken in, beside the event loop: it may take
    seconds. What it returns for the first one is called on the event loop, before its engine
    starts, with the admission for all.
    `on_fault`: from any thread, with what no retry can mend.
    """

    def __init__(
        self,
        clients: Sequence[ComputeClient],
        fleet: Fleet,
        options: RosterOptions,
        *,
        prepare: Callable[[ConnectedPlane], Attach],
        on_fault: Callable[[BaseException], None],
    ) -> None:
        self._clients = clients
        self._fleet = fleet
        self._options = options
        self._prepare = prepare
        self._on_fault = on_fault
        self._admission: Admission | None = None
        self._began = time.monotonic()
        self._stop_connecting = threading.Event()
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="compute-plane")
        self._bring_ups: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to connect."""
        for client in self._clients:
            task = asyncio.create_task(self._bring_up(client))
            task.add_done_callback(self._note_bring_up)
            self._bring_ups.append(task)

    def has_turned(self) -> bool:
        """Whether every engine has turned since this was last asked."""
        turned = [member.has_turned() for member in self._fleet.members]  # each is asked
        return all(turned)

    def stop_connecting(self) -> None:
        """Take no further plane in."""
        self._stop_connecting.set()

    async def stop(self, patience_s: float) -> None:
        """End the engines and their requests; each gets that long."""
        self._fleet.begin_to_stop()
        loop = asyncio.get_running_loop()
        stops = [
            loop.run_in_executor(None, member.stop, patience_s) for member in self._fleet.members
        ]
        await asyncio.gather(*stops)

    async def shut_down(self, patience_s: float) -> None:
        """Close the connections, after `stop_connecting` and `stop`."""
        if self._bring_ups:
            await asyncio.wait(self._bring_ups, timeout=patience_s)
        for client in self._clients:
            client.shut_down()
        self._threads.shutdown(wait=False)

    # --- one plane ---

    async def _bring_up(self, client: ComputeClient) -> None:
        """Wait for a plane and take it in. Raises EngineError for one that cannot be."""
        loop = asyncio.get_running_loop()
        complaint = ""
        while not self._stop_connecting.is_set():
            try:
                connected = await loop.run_in_executor(self._threads, self._connect, client)
                # A plane taken in after the end began would get an engine that nobody stops.
                if connected is None or self._stop_connecting.is_set():
                    return
                self._take_in(client, *connected)
            except EngineError as error:
                if self._admission is None or time.monotonic() - self._began < START_S:
                    raise
                if error.message != complaint:
                    complaint = error.message
                    _log.error("compute plane not taken in", error=complaint)
                await loop.run_in_executor(self._threads, self._stop_connecting.wait, NEXT_TRY_S)
            else:
                return

    def _connect(self, client: ComputeClient) -> tuple[ConnectedPlane, Attach | None] | None:
        connected = connect(client, self._options.limits, stop=self._stop_connecting)
        if connected is None:
            return None
        return connected, self._prepare(connected) if self._admission is None else None

    def _take_in(
        self, client: ComputeClient, connected: ConnectedPlane, attach: Attach | None
    ) -> None:
        """Make a member of the fleet and start its engine. Raises PlaneMismatchError.

        `attach`: there if no plane had been taken in when this one answered.
        """
        address = str(client.address)
        members = self._fleet.members
        if members:
            check_same_model(members[0].connected, connected, address)

        member = Member(
            client,
            connected,
            lambda member: self._make_loop(client, connected, member),
            on_fault=self._on_fault,
        )
        self._fleet.add(member)
        if self._admission is None:
            self._admission = connected.make_admission()
            if attach is not None:
                attach(self._admission)
        else:
            self._admission.add_alternative(member.facts.admission)
        _log_plane(connected, address)
        member.start()

    def _make_loop(
        self, client: ComputeClient, connected: ConnectedPlane, member: Member
    ) -> EngineLoop:
        fleet, options = self._fleet, self._options
        link: ComputeLink = client
        if len(self._clients) > 1:
            grace_s = options.loop.compute_grace_s
            link = OneOfSeveral(
                client,
                address=str(client.address),
                others_serve=lambda: fleet.others_serve(member, grace_s),
            )
        loop = make_loop(
            link,
            connected,
            fleet.publish,
            options=options.loop,
            factories=options.factories,
            on_link_change=lambda is_linked: fleet.note_link(member, is_linked),
        )
        if len(self._clients) > 1 and not loop.can_move_requests:
            wanted = " and ".join(name for name in dir(MovesRequests) if not name.startswith("_"))
            raise ConfigError(
                f"scheduler: one for several compute planes must have {wanted}", field="scheduler"
            )
        return loop

    def _note_bring_up(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        # Once the end has begun, the connection is taken away from under it.
        if error is not None and not self._stop_connecting.is_set():
            self._on_fault(error)


def _log_plane(connected: ConnectedPlane, address: str) -> None:
    plane, limits = connected.plane, connected.limits
    _log.info(
        "compute plane connected",
        address=address,
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
