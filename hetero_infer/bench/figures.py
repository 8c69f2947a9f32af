"""Statistics of samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


def median(samples: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(samples) if samples else math.nan


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the value below which `share` percent of the samples lie; NaN of nothing.

    Between two samples it is interpolated in a straight line, as NumPy does by default.
    """
    if not samples:
        return math.nan
    ordered = sorted(samples)
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99 and the largest."""
    figures = {f"p{share}": percentile(samples, share) for share in PERCENTILES}
    return {**figures, "max": max(samples, default=math.nan)}


def ratio(part: float, whole: float) -> float:
    """Return part / whole; NaN where there is no whole."""
    return part / whole if whole else math.nan
