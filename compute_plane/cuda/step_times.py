"""How long steps of each kind take, so that who waits for one is awake when it ends.

A thread that the driver wakes comes late: 85 and 238 µs in two runs on an H200, behind half a
millisecond's work. One that looks again and again is there at once, but takes a core. So a waiter
sleeps for as long as the device surely works, and looks from then on:

    device   │ step n            │ step n+1          │
    waiter    asleep ──────▶ looks asleep ─────▶ looks
                             └─┬─┘ `AWAKE_S`, and how late sleepers wake on this machine

Steps of a *kind*, one graph's, take about as long as the one before. What is not known is learned:
of the first two of a kind, by looking all the time (the first one may have had to be loaded); of
how late this machine wakes, at every wake. Steps without a kind may take any time: whoever waits
for them is woken by the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from compute_plane.cuda.drivers import Event

AWAKE_S: Final = 50e-6
"""A waiter wants to be awake for so long before the end."""
GROWTH: Final = 1.05
"""What is expected of a kind grows by no more a step: one slow step lets nobody oversleep."""
SHRINKING: Final = 0.5
"""What is expected falls to that after a step that was over sooner; when is not known."""
FORGETTING: Final = 0.95
"""Of the latest wake, a step."""
MOST_AWAKE: Final = 0.5
"""However late this machine has woken somebody, he sleeps for the rest of the time expected."""
WATCHED_AT_FIRST: Final = 2
"""Steps of a kind that are watched from launch to end; the shorter one is believed."""
WOKEN_LATE_S: Final = 300e-6
"""By no more is the driver late, it is assumed: a step without a kind did not end before."""


class StepTimes:
    """What was learned of a device's steps.

    Several threads may wait for a step, steps are waited for in their order. `clock`: seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._usual_s: dict[int, float] = {}
        self._num_watched: dict[int, int] = {}
        self._last_end_s = 0.0  # of the step before; if that is not known, not later than it was
        self._late_s = 0.0

    def begin(self, kind: int | None) -> TimedStep:
        """Note that the device has the work of a step from now on; None: of no kind."""
        return TimedStep(self, kind, self._clock())

    def wait(self, step: TimedStep, done: Event) -> None:
        """Wait for a step and learn. Raises what the device reports."""
        if step.ended_s is not None:
            done.wait()
            return
        if step.kind is None:
            done.wait()
            self._learn_end(step)
            return
        began_s = max(step.begun_s, self._last_end_s)
        usual_s = self._usual_s.get(step.kind, 0.0)
        late_s = None
        if self._num_watched.get(step.kind, 0) >= WATCHED_AT_FIRST:
            awake_s = min(AWAKE_S + self._late_s, usual_s * MOST_AWAKE)
            late_s = self._sleep_until(began_s + usual_s - awake_s)
        is_over = done.is_done()
        done.wait()
        end_s = self._clock()
        with self._lock:
            if step.ended_s is None:
                self._learn(step, began_s, end_s, is_over=is_over, late_s=late_s)

    def _learn_end(self, step: TimedStep) -> None:
        """Take in a step of no kind: it may have been over for some time."""
        with self._lock:
            if step.ended_s is None:
                step.ended_s = self._clock()
                self._last_end_s = max(self._last_end_s, step.ended_s - WOKEN_LATE_S)

    def _learn(
        self,
        step: TimedStep,
        began_s: float,
        end_s: float,
        *,
        is_over: bool,
        late_s: float | None,
    ) -> None:
        """Take in a step that began and ended then; `is_over`: at the latest."""
        kind = step.kind
        if kind is None:
            raise ValueError("a step of no kind teaches nothing of a kind")
        usual_s = self._usual_s.get(kind, 0.0)
        if not is_over:
            took_s = end_s - began_s
            self._usual_s[kind] = min(took_s, usual_s * GROWTH) if usual_s else took_s
            self._num_watched[kind] = self._num_watched.get(kind, 0) + 1
        else:
            if usual_s:
                end_s = min(end_s, began_s + usual_s)
            if late_s is not None and late_s <= AWAKE_S + self._late_s:
                self._usual_s[kind] = usual_s * SHRINKING
        step.ended_s = self._last_end_s = end_s
        self._late_s = max(late_s or 0.0, self._late_s * FORGETTING)

    def _sleep_until(self, wake_s: float) -> float | None:
        """Sleep, and return how late the wake was; None if there was no time to sleep."""
        left_s = wake_s - self._clock()
        if left_s <= 0:
            return None
        self._sleep(left_s)
        return max(0.0, self._clock() - wake_s)


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step that is queued. `begun_s`: since when the device has it.

    `ended_s`: when it was over, as far as could be seen; None until somebody has waited for it.
    """

    times: StepTimes
    kind: int | None
    begun_s: float
    ended_s: float | None = None

    @property
    def begun_ns(self) -> int | None:
        """`begun_s`, as a `LaunchedStep` says it; launches are a part of a step of no kind."""
        return None if self.kind is None else round(self.begun_s * 1e9)

    @property
    def ended_ns(self) -> int | None:
        """`ended_s`, likewise."""
        return None if self.ended_s is None else round(self.ended_s * 1e9)

    @property
    def is_watched(self) -> bool:
        """Whether who waits for it looks for its end."""
        return self.kind is not None

    def end(self, done: Event) -> Event:
        """Return an event, the end of this step, that is waited for as described."""
        return _End(self, done)


@dataclass(frozen=True, slots=True)
class _End:
    step: TimedStep
    done: Event

    def is_done(self) -> bool:
        return self.done.is_done()

    def wait(self) -> None:
        self.step.times.wait(self.step, self.done)
