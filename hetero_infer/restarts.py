"""When a plane that has ended is started again, and when that is of no use."""

from __future__ import annotations

from planes.errors import ExecutionError

MAX_FAILED_STARTS = 5
"""In a row, each of a plane that ended before it served: something is wrong that stays wrong."""

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 8.0

STEADY_S = 60.0
"""The pauses begin anew after a plane that served and lived that long."""


class Restarts:
    """Counts the ends of one plane's processes.

    A plane that has served is worth another start however often it dies, only later each time: one
    that always dies at once must not keep the machine busy.
    """

    def __init__(self) -> None:
        self._num_failed = 0
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, how: str, *, has_served: bool, lived_s: float) -> float:
        """Note an end; how long to wait before another one is started.

        `how`: it ended. Raises ExecutionError if too many starts in a row failed.
        """
        if not has_served:
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_STARTS:
                raise ExecutionError(f"{MAX_FAILED_STARTS} starts in a row failed: {how}")
        else:
            self._num_failed = 0
            if lived_s >= STEADY_S:
                self._pause_s = FIRST_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return pause_s
