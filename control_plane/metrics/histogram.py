"""Histograms that cost little to fill and are put together when somebody looks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

MAX_PENDING = 1024
"""Values of a `BatchedHistogram` before they are sorted into their buckets."""


class Reading(NamedTuple):
    """A histogram at one moment: `counts[i]` values were above bound i-1 and at most bound i.

    The last count is of those above every bound. `total`: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float

    @property
    def num_values(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


class Histogram:
    """Counts values by buckets; one thread observes, any thread reads.

    `bounds`: increasing; a value equal to one belongs below it. A reading from another thread may
    have a value in its counts and not yet in its total.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> Reading:
        """Return what was counted."""
        return Reading(self._bounds, list(self._counts), self._total)


class BatchedHistogram:
    """A histogram for a value a token: those of one step are mostly equal, and counted together.

    Used by one thread, which reads too.
    """

    __slots__ = ("_histogram", "_pending")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._histogram = Histogram(bounds)
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        """Count a value."""
        pending = self._pending
        pending.append(value)
        if len(pending) >= MAX_PENDING:
            self._sort()

    def read(self) -> Reading:
        """Return what was counted."""
        self._sort()
        return self._histogram.read()

    def _sort(self) -> None:
        for value, times in Counter(self._pending).items():
            self._histogram.observe(value, times)
        self._pending.clear()
