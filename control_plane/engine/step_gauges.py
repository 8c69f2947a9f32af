"""What the last steps say about both planes: how busy the device is, how prompt the engine."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.batch import StepResult

NUM_KEPT = 1024
"""Steps that count: a few seconds of decoding."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of the last `NUM_KEPT` steps; None where there was no step.

    `plane_step_s`: mean time of a step on the device. `plane_idle_share`: of the device's time,
    the share in which it waited for a batch although there was work, 0 to 1. `plane_queue_s`: mean
    time that a batch waited at the plane. `scheduling_delay_p99_s`: how long a result waited for
    the engine thread, 99 of 100 times at most.
    """

    plane_step_s: float | None
    plane_idle_share: float | None
    plane_queue_s: float | None
    scheduling_delay_p99_s: float | None


class _Ring:
    """The last numbers; one thread adds, any thread reads."""

    __slots__ = ("_next", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._next = 0

    def add(self, number: int) -> None:
        if len(self._numbers) < NUM_KEPT:
            self._numbers.append(number)
            return
        self._numbers[self._next] = number
        self._next = (self._next + 1) % NUM_KEPT

    def read(self) -> list[int]:
        """Return a copy, in no order."""
        return list(self._numbers)


class StepGauges:
    """Collects on the engine thread, at the price of four list entries a step."""

    __slots__ = ("_delays_us", "_idle_us", "_queue_us", "_step_us")

    def __init__(self) -> None:
        self._step_us = _Ring()
        self._idle_us = _Ring()
        self._queue_us = _Ring()
        self._delays_us = _Ring()

    def note(self, result: StepResult, *, had_work: bool) -> None:
        """Take in a result. `had_work`: whether there was work before this step could be sent.

        A device that idles because nobody asks for anything is not waiting for us.
        """
        self._step_us.add(result.execute_us)
        self._idle_us.add(result.idle_us if had_work else 0)
        self._queue_us.add(result.queue_us)
        self._delays_us.add(result.waited_us)

    def read(self) -> StepFigures:
        """Sum up; any thread."""
        steps, idle, delays = self._step_us.read(), self._idle_us.read(), self._delays_us.read()
        queued = self._queue_us.read()
        total_us = sum(steps) + sum(idle)
        return StepFigures(
            plane_step_s=sum(steps) / len(steps) / 1e6 if steps else None,
            plane_idle_share=sum(idle) / total_us if total_us else None,
            plane_queue_s=sum(queued) / len(queued) / 1e6 if queued else None,
            scheduling_delay_p99_s=percentile_99(delays) / 1e6 if delays else None,
        )


def percentile_99(numbers: list[int]) -> int:
    """Return the least number that 99 of 100 do not exceed (nearest rank). At least one number."""
    return sorted(numbers)[-(-len(numbers) * 99 // 100) - 1]
