"""How long steps of each kind take, so that who waits for one is awake when it ends.

A thread that the driver wakes comes late: 85 and 238 µs in two runs on an H200, of steps of a
millisecond. One that looks again and again is there at once, but takes a core. So a waiter sleeps
for as long as the device surely works, and looks from then on:

    device   │ step n            │ step n+1          │
    waiter    asleep ──────▶ looks asleep ─────▶ looks
                             └─┬─┘ `AWAKE_S`, and how late sleepers wake on this machine

Steps of a *kind*, one graph's, take about as long as the one before. What is not known is learned:
of the first of a kind, by looking all the time; of how late this machine wakes, at every wake.
Steps without a kind may take any time: whoever waits for them is woken by the driver.
"""

from __future__ import annotations

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
SHRINKING: Final = 0.75
"""What is expected falls to that after a step that was over sooner; when is not known."""
FORGETTING: Final = 0.95
"""Of the latest wake, a step."""
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
        self._usual_s: dict[int, float] = {}
        self._last_end_s = 0.0  # of the step before; if that is not known, not later than it was
        self._late_s = 0.0

    def begin(self, kind: int | None) -> TimedStep:
        """Note that the device has the work of a step from now on; None: of no kind."""
        return TimedStep(self, kind, self._clock())

    def wait(self, step: TimedStep, done: Event) -> None:
        """Wait for a step and learn. Raises what the device reports."""
        if step.is_known:
            done.wait()
            return
        if step.kind is None:
            done.wait()
            step.is_known = True
            self._last_end_s = max(self._last_end_s, self._clock() - WOKEN_LATE_S)
            return
        began_s = max(step.begun_s, self._last_end_s)
        usual_s = self._usual_s.get(step.kind, 0.0)
        late_s = self._sleep_until(began_s + usual_s - AWAKE_S - self._late_s)
        is_over = done.is_done()
        done.wait()
        if step.is_known:
            return
        step.is_known = True
        end_s = self._clock()
        if not is_over:
            took_s = end_s - began_s
            self._usual_s[step.kind] = min(took_s, usual_s * GROWTH) if usual_s else took_s
            self._last_end_s = end_s
        else:
            self._last_end_s = min(end_s, began_s + usual_s)
            if late_s is not None and late_s <= AWAKE_S + self._late_s:
                self._usual_s[step.kind] = usual_s * SHRINKING
        if late_s is not None:
            self._late_s = max(late_s, self._late_s * FORGETTING)

    def _sleep_until(self, wake_s: float) -> float | None:
        """Sleep, and return how late the wake was; None if there was no time to sleep."""
        left_s = wake_s - self._clock()
        if left_s <= 0:
            return None
        self._sleep(left_s)
        return max(0.0, self._clock() - wake_s)


@dataclass(slots=True, eq=False)
class TimedStep:
    """A step that is queued. `begun_s`: since when the device has it. `is_known`: it is over."""

    times: StepTimes
    kind: int | None
    begun_s: float
    is_known: bool = False

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
