"""The steps under way: how long the oldest may take, and what the finished ones showed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from control_plane.core.batch import StepResult
from control_plane.core.interface import SchedulerOutput
from control_plane.engine.deadlines import StepCost, StepDeadlines
from control_plane.engine.step_gauges import StepGauges
from control_plane.errors import LinkError
from control_plane.metrics.plane_meter import PlaneMeter

USUAL_DEPTH = 2
"""Batches under way while the device does not wait for them: one runs, the next one is there."""

DRY_SHARE = 20
"""A device that waited for a twentieth of a step's time, although there was work, ran dry, unless
the batch had been there since before the step ahead of it: then the plane was late to launch it."""

DRY_STEPS = 256
"""For so many steps behind such a one, a batch more is sent ahead."""

SETTLING_STEPS = 8
"""So many steps show what a batch more has changed, before there may be another one."""

MOST_FURTHER = 6
"""Batches beyond the usual ones."""

_log = structlog.get_logger(__name__)


class _Sent(NamedTuple):
    """A step under way, and whose rows it has."""

    step_id: int
    request_ids: tuple[Sequence[int], Sequence[int]]
    cost: StepCost
    num_rows: int
    sent_at: float


def _came_late(result: StepResult) -> bool:
    """Whether the device waited for a batch, and not for its launch alone."""
    return (
        result.idle_us * DRY_SHARE > result.execute_us
        and result.queue_us < result.idle_us + result.execute_us
    )


class StepsInFlight:
    """Steps sent and not answered, in order; engine thread only, except for the properties.

    Its health follows progress: `is_stalled` from the moment a step is overdue until a result has
    come, or `calm`. Nothing under way is no stall. `clock`: monotonic seconds. `meter`: is told of
    every step that came back.

    One batch that waits at the plane is enough as long as a step takes longer than its result and
    the next batch are on their way. Where the device has waited for batches, there is a further one
    for some time, and where it waits nevertheless, another: for each, of a request that ends one
    token more is computed for nothing, and a new one begins a step later.
    """

    def __init__(self, clock: Callable[[], float], meter: PlaneMeter | None = None) -> None:
        self._clock = clock
        self._meter = meter or PlaneMeter()
        self._deadlines = StepDeadlines()
        self._steps: deque[_Sent] = deque()
        self._progress_at = clock()  # when the oldest step under way became that
        self._patience_s = 0.0  # of the oldest
        self._had_work = False
        self._is_overdue = False
        self._most_further = MOST_FURTHER
        self._num_further = 0  # batches sent ahead beyond the usual ones
        self._num_dry = 0  # steps until that is one less
        self._num_settling = 0  # steps until it may be one more
        self.gauges = StepGauges()
        self.is_stalled = False
        self.num_stalls = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step_age_s(self) -> float:
        """Since the plane last got on with its steps under way; 0 without any. Any thread."""
        return max(0.0, self._clock() - self._progress_at) if self._steps else 0.0

    @property
    def suspects(self) -> set[int]:
        """Whose rows the oldest step has: what the plane was doing, most likely."""
        return {i for ids in self._steps[0].request_ids for i in ids} if self._steps else set()

    def add(self, output: SchedulerOutput) -> None:
        """Note that a step is sent."""
        batch, request_ids = output.batch, (output.decode_request_ids, output.prefill_request_ids)
        cost = StepCost.of(batch)
        self._steps.append(_Sent(batch.step_id, request_ids, cost, batch.num_rows, self._clock()))
        if len(self._steps) == 1:
            self._begin_oldest()

    def take(self, result: StepResult) -> None:
        """Note the result of the oldest step."""
        sent, now = self._steps.popleft(), self._clock()
        # A result that came while the engine was busy with another one seems to have taken nothing.
        took_s = max(now - self._progress_at, result.execute_us / 1e6)
        self._deadlines.note(sent.cost, took_s)
        self._meter.note_step(
            rtt_s=max(0.0, now - sent.sent_at - result.waited_us / 1e6),
            execute_s=result.execute_us / 1e6,
            num_tokens=sent.cost.num_tokens,
        )
        self.gauges.note(result, had_work=self._had_work)
        self._note_idle(is_dry=self._had_work and _came_late(result))
        self.is_stalled = False
        self._begin_oldest()

    def depth(self, most: int) -> int:
        """Return how many batches are to be under way, if there may be `most`.

        No more are counted as further ones from then on.
        """
        self._most_further = min(MOST_FURTHER, max(0, most - USUAL_DEPTH))
        return min(most, USUAL_DEPTH + self._num_further)

    def note_work(self, *, is_left: bool) -> None:
        """Note after a result whether there is work for the plane to go on with."""
        self._had_work = is_left

    def clear(self) -> None:
        """Forget what is under way: the session is lost.

        Unless that was because a step is overdue, the next session is with another process, most
        likely, which has everything to compile.
        """
        self._steps.clear()
        self._had_work = False
        self._num_further = self._num_dry = self._num_settling = 0
        if not self._is_overdue:
            self._deadlines.forget()
        self._is_overdue = False

    def calm(self) -> None:
        """Note that nobody wants anything of the plane any more."""
        self.is_stalled = False

    @property
    def remaining_s(self) -> float | None:
        """How long the oldest step may still take; None without one."""
        if not self._steps:
            return None
        return max(0.0, self._progress_at + self._patience_s - self._clock())

    def check(self) -> None:
        """Raise LinkError, log and count if the oldest step is overdue."""
        if self.remaining_s != 0.0:
            return
        sent = self._steps[0]
        self.is_stalled = self._is_overdue = True
        self.num_stalls += 1
        self._deadlines.note_overdue()
        _log.error(
            "step overdue",
            step_id=sent.step_id,
            patience_s=round(self._patience_s, 3),
            num_rows=sent.num_rows,
            num_tokens=sent.cost.num_tokens,
            num_pairs=sent.cost.num_pairs,
        )
        raise LinkError(f"step {sent.step_id} is overdue: no result in {self._patience_s:.3g} s")

    def _note_idle(self, *, is_dry: bool) -> None:
        """Send a batch more ahead of a device that ran dry, and one less after a while."""
        if is_dry:
            self._num_dry = DRY_STEPS
            if self._num_further < self._most_further and not self._num_settling:
                self._num_further += 1
                self._num_settling = SETTLING_STEPS
                return
        elif self._num_further:
            self._num_dry -= 1
            if self._num_dry == 0:
                self._num_further -= 1
                self._num_dry = DRY_STEPS
        self._num_settling = max(0, self._num_settling - 1)

    def _begin_oldest(self) -> None:
        self._progress_at = self._clock()
        if self._steps:
            self._patience_s = self._deadlines.patience_s(self._steps[0].cost)
