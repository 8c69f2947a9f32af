"""The engine loop: commands in, batches out, results in, tokens published.

    commands → scheduler.apply; batch = scheduler.schedule(); link.send(batch)
    if the pipeline is full: result = link.receive(); events = scheduler.commit(result)
    publish(events)

Everything here runs on one thread, the engine thread: that of `EngineThread`, or the caller's who
uses `step`. With a pipeline depth of 2 the plane computes one batch while the next one is put
together; with 1 each batch is waited for, with 3 and 4 a device that waits for batches gets more
(`steps_in_flight`). The tokens are the same.

The compute plane may vanish at any moment, or not answer in time. Then nothing that was sent
counts: the scheduler forgets slots and blocks (`lose_epoch`), the link is opened again, and every
request is computed anew from its prompt and the tokens it has; its stream goes on behind the last
token published. (A connection that breaks under a living session the link mends, unseen from here.)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from control_plane.core.interface import MovesRequests, SchedulerProtocol
from control_plane.core.kv_cache import MemoryStats
from control_plane.engine.commands import CommandDesk
from control_plane.engine.events import Publisher, RequestInfo
from control_plane.engine.inbox import Adopt, Inbox
from control_plane.engine.ledger import Ledger
from control_plane.engine.link import ComputeLink
from control_plane.engine.steps_in_flight import StepsInFlight
from control_plane.engine.trials import Trials
from control_plane.engine.vain_losses import MAX_LOSSES_WITHOUT_PROGRESS, VainLosses
from control_plane.errors import ComputeUnavailableError, LinkError
from control_plane.metrics.plane_meter import PlaneMeter
from control_plane.telemetry import EngineMetrics
from planes.errors import EngineError

RECONNECT_PAUSE_S = 0.05
"""Between attempts to open the link; gRPC itself connects again after 50 to 250 ms."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How the loop runs.

    `pipeline_depth`: batches under way at once, at most. `max_queued_requests`: waiting requests,
    however many samples they have, before new ones are refused. `compute_grace_s`: how long
    requests outlive the compute plane.
    """

    pipeline_depth: int = 2
    max_queued_requests: int = 4096
    compute_grace_s: float = 30.0


class EngineLoop:
    """Drives one scheduler over one link.

    `publish` gets every turn's news at once. `on_link_change` is told when the plane is opened
    (True) or lost (False); one that stalled counts as lost until it has answered a step, or nobody
    wants anything of it any more. `memory_stats` reads the block pool. All three are called on the
    engine thread. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: SchedulerProtocol,
        link: ComputeLink,
        publish: Publisher,
        *,
        memory_stats: Callable[[], MemoryStats],
        options: LoopOptions | None = None,
        on_link_change: Callable[[bool], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox = Inbox(wake=link.interrupt)
        self.wake = link.interrupt
        self._scheduler = scheduler
        self._link = link
        self._publish = publish
        self._read_memory_stats = memory_stats
        self._options = options or LoopOptions()
        self._on_link_change = on_link_change
        self._clock = clock
        self.meter = PlaneMeter()
        self._ledger = Ledger(clock, self.meter)
        self._sent = StepsInFlight(clock, self.meter)
        self._desk = CommandDesk(
            scheduler,
            self._ledger,
            max_queued_requests=self._options.max_queued_requests,
            check_grace=self._check_grace,
            may_move=lambda: not self._is_linked,
            publish_news=self._publish_news,
            clock=clock,
        )
        self._received_at: float | None = None  # a result, in this turn
        self._is_linked = False
        self._is_well = False  # as last told to `on_link_change`
        self._lost_at = clock()
        self._losses = VainLosses()
        self._trials = Trials(scheduler, self._ledger)
        self._num_losses = 0
        self._memory = memory_stats()
        self._metrics = EngineMetrics()

    # --- what other threads may read: frozen values, replaced once a turn ---

    @property
    def metrics(self) -> EngineMetrics:
        """Counts as of the last turn, and how the steps go right now."""
        figures = self._sent.gauges.read()
        return dataclasses.replace(
            self._metrics,
            num_plane_losses=self._num_losses,
            num_stalls=self._sent.num_stalls,
            last_step_age_s=self._sent.last_step_age_s,
            plane_step_s=figures.plane_step_s or 0.0,
            plane_idle_share=figures.plane_idle_share or 0.0,
            plane_queue_s=figures.plane_queue_s or 0.0,
            scheduling_delay_p99_s=figures.scheduling_delay_p99_s or 0.0,
        )

    @property
    def memory_stats(self) -> MemoryStats:
        """Use of the block pool as of the last turn."""
        return self._memory

    @property
    def num_open_requests(self) -> int:
        """Requests admitted and not ended."""
        return self._ledger.num_open

    @property
    def can_move_requests(self) -> bool:
        """Whether its scheduler can give requests away and adopt others."""
        return isinstance(self._scheduler, MovesRequests)

    @property
    def has_pending_work(self) -> bool:
        """Whether any request is waiting, running or about to be read from the inbox."""
        return len(self.inbox) > 0 or self._scheduler.has_pending_work()

    # --- turns ---

    def step(self) -> None:
        """Run one turn for a caller who has no engine thread; waits for one result at most."""
        self._apply_commands()
        self._send_batches()
        if self._sent or not self._is_linked:
            self._receive()
        self._finish_turn()

    def turn(self) -> None:
        """Run one turn of the engine thread: wait for whatever comes, and answer it.

        The next batch is sent before the news of the last one is published: the plane waits less.
        """
        self._received_at = None
        self._receive()
        self._apply_commands()
        self._send_batches()
        self._note_turn()
        self._finish_turn()

    def list_requests(self, *, include_ended: bool = False) -> list[RequestInfo]:
        """Return what the requests are doing, for a caller who has no engine thread."""
        self._apply_commands()
        return self._ledger.list_requests(include_ended=include_ended)

    def fail_all(self, error: EngineError) -> None:
        """End every request with `error` and publish that."""
        self._apply_commands()
        self._fail_all(error)
        self._finish_turn()

    def close(self) -> None:
        """End the session with the compute plane."""
        self._link.close()
        self._set_linked(is_linked=False)

    # --- commands ---

    def _apply_commands(self) -> None:
        for command in self.inbox.drain():
            self._desk.carry_out(command)
            if isinstance(command, Adopt):  # planes may have been lost with it
                self._trials.begin([command.moving.request.id])
            else:
                self._trials.go_on()
            if not self._scheduler.has_pending_work():
                self._losses.note_progress()  # whatever the plane was lost with has gone

    # --- batches out ---

    def _send_batches(self) -> None:
        """Send steps until the pipeline is full or nothing can be computed before a result."""
        if not self._is_linked and not self._open_link():
            return
        try:
            while len(self._sent) < self._sent.depth(self._options.pipeline_depth):
                output = self._scheduler.schedule(self._clock())
                if output is None:
                    return
                self._ledger.note_step(output.prefill_request_ids)
                self._sent.add(output)
                self._link.send(output.batch)
        except LinkError as error:
            self._lose_link(error)

    # --- results in ---

    def _receive(self) -> None:
        """Wait for a result, a command, or the moment something is overdue; commit a result."""
        try:
            result = self._link.receive(self._patience_s())
            if result is None:
                self._sent.check()
                return
            self._sent.take(result)
            self._losses.note_progress()
            now = self._received_at = self._clock()
            for output in self._scheduler.commit(result, now):
                self._ledger.take(output, now)
            self._trials.end_probe()
            self._sent.note_work(is_left=self._scheduler.has_pending_work())
            if result.refusal is not None:
                # A fault of ours, or the executor's. The batches sent after it were made as if it
                # had run: only a new session is sure not to run them. Their requests did no harm.
                self._sent.clear()
                refused = LinkError(f"step {result.step_id} was refused: {result.refusal}")
                self._lose_link(refused, is_fault=True)
        except LinkError as error:
            self._lose_link(error)

    def _patience_s(self) -> float | None:
        remaining_s = self._sent.remaining_s
        if remaining_s is not None:
            return remaining_s
        return None if self._is_linked else RECONNECT_PAUSE_S

    # --- the link ---

    def _open_link(self) -> bool:
        """Try once to open the link; the scheduler starts from nothing on it."""
        last_step = self._link.open()
        if last_step is None:
            if self._ledger.num_open:
                try:
                    self._check_grace()
                except ComputeUnavailableError as error:
                    self._fail_all(error)
            return False
        self._scheduler.lose_epoch(last_step)
        self._sent.clear()
        self._set_linked(is_linked=True)
        return True

    def _lose_link(self, error: LinkError, *, is_fault: bool = False) -> None:
        """Give the session up; requests stay and wait for the next one. `is_fault`: a program's."""
        tell = _log.error if is_fault else _log.warning
        tell("link lost", error=error.message, steps_in_flight=len(self._sent))
        self.meter.num_losses += 1
        self._num_losses += 1
        self._losses.note(while_computing=bool(self._sent), is_probe=self._trials.is_probing)
        self._trials.end_probe()
        suspects = self._sent.suspects
        self._link.close()
        self._sent.clear()
        # At once, not when the link is open again: cancelled requests free their blocks now.
        self._scheduler.lose_epoch()
        self._lost_at = self._clock()
        was_told = not self._is_well
        self._set_linked(is_linked=False)
        if was_told and self._on_link_change is not None:
            # Of a plane that had stalled and come back, what it was given since may move as well.
            self._on_link_change(False)
        self._give_up(suspects)

    def _give_up(self, suspects: Iterable[int]) -> None:
        """End the requests that seem to kill planes; `suspects`: that were being computed.

        Those that only waited go on then, unless that has happened some times without a result.
        """
        most, has_blamed = MAX_LOSSES_WITHOUT_PROGRESS, False
        for request_id in suspects:
            if self._ledger.note_loss(request_id) >= most:
                has_blamed = True
                self._fail(
                    request_id,
                    ComputeUnavailableError(
                        f"compute planes were lost {most} times in a row while they computed this "
                        "request"
                    ),
                )
        self._trials.begin(suspects)
        if has_blamed:
            self._losses.note_blame()
            self._trials.probe()
        num_losses = self._losses.give_up_after()
        if num_losses is not None:
            self._fail_all(
                ComputeUnavailableError(
                    f"the compute plane was lost {num_losses} times in a row without a result"
                )
            )

    def _set_linked(self, *, is_linked: bool) -> None:
        self._is_linked = is_linked
        self._tell_health()

    def _tell_health(self) -> None:
        """Report the plane well or not, if that is news: a stalled one is not, until it goes on."""
        if self._sent.is_stalled and not self._scheduler.has_pending_work():
            self._sent.calm()
        is_well = self._is_linked and not self._sent.is_stalled
        if is_well != self._is_well:
            self._is_well = is_well
            if self._on_link_change is not None:
                self._on_link_change(is_well)

    def _check_grace(self) -> None:
        """Raise ComputeUnavailableError once the compute plane has been away too long."""
        grace_s = self._options.compute_grace_s
        if not self._is_linked and self._clock() - self._lost_at > grace_s:
            raise ComputeUnavailableError(
                f"the compute plane has been away for more than {grace_s:g} s (compute_grace)"
            )

    def _fail_all(self, error: EngineError) -> None:
        for request_id in self._ledger.open_ids():
            self._fail(request_id, error)

    def _fail(self, request_id: int, error: EngineError) -> None:
        self._scheduler.cancel(request_id)
        self._ledger.fail(request_id, error)
        self._trials.go_on()

    # --- the end of a turn ---

    def _note_turn(self) -> None:
        """Measure how long a result kept this thread until the next batch was on its way."""
        if self._received_at is not None:
            self.meter.turn.observe(self._clock() - self._received_at)

    def _finish_turn(self) -> None:
        """Publish the turn's news, then renew what other threads read."""
        self._tell_health()
        self._scheduler.get_completed()  # its events said it all; not taken, they would pile up
        self._memory = self._read_memory_stats()
        self._metrics = self._ledger.metrics(
            self._scheduler.get_stats(), memory_utilization=self._memory.utilization
        )
        self._publish_news()

    def _publish_news(self) -> None:
        updates = self._ledger.take_updates()
        if updates:
            self._publish(updates)
