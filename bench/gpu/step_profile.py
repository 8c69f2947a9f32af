"""Where the time of a decode step goes: its kernels, and the pauses between them.

`engine_steps` says how long a step takes beside what it must read. This says which of its kernels,
and how many microseconds between them, are to blame for the rest.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

LONGEST_NAME: Final = 100
"""Characters: libraries write their template arguments out."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel, copy or fill that ran on the device; times in µs, of the profiler's clock."""

    name: str
    start: float
    end: float


def profiled_runs(queue_work: Callable[[], object], device: str) -> list[KernelRun]:
    """Return what ran on the device, in the order of its starts, while `queue_work` ran.

    On a CPU these are torch's operations. Raises RuntimeError where the profiler sees nothing: of a
    device it needs CUPTI, which torch's packages bring along.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        queue_work()
        if device != "cpu":
            torch.cuda.synchronize()
    wanted = DeviceType.CPU if device == "cpu" else DeviceType.CUDA
    runs = [
        KernelRun(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == wanted
    ]
    if not runs:
        raise RuntimeError("torch's profiler saw nothing run on the device")
    return sorted(runs, key=lambda run: run.start)


def where_time_goes(runs: Sequence[KernelRun], steps: int) -> dict[str, Any]:
    """Return figures of a step, in µs, from what ran in `steps` of them one after the other.

    `span_us`: from its beginning to the next one's; `busy_us`: when anything ran, `pauses_us`: when
    nothing did. `kernels`: of each name how many a step has, its median, and what all take in a
    step, the largest first. A profiled kernel is told apart by its start and its end, which makes
    pauses longer than they are without the profiler.
    """
    pauses = list(_pauses(runs))
    span = max(run.end for run in runs) - runs[0].start
    by_name: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        by_name[run.name[:LONGEST_NAME]].append(run.end - run.start)
    kernels = [
        {
            "name": name,
            "per_step": len(times) / steps,
            "median_us": statistics.median(times),
            "us_per_step": sum(times) / steps,
        }
        for name, times in by_name.items()
    ]
    return {
        "steps": steps,
        "span_us": span / steps,
        "busy_us": (span - sum(pauses)) / steps,
        "pauses_us": sum(pauses) / steps,
        "pauses_per_step": len(pauses) / steps,
        "median_pause_us": statistics.median(pauses) if pauses else 0.0,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us_per_step"]),
    }


def _pauses(runs: Iterable[KernelRun]) -> Iterable[float]:
    """Yield how long nothing ran, each time that nothing did."""
    busy_until = None
    for run in runs:
        if busy_until is not None and run.start > busy_until:
            yield run.start - busy_until
        busy_until = run.end if busy_until is None else max(busy_until, run.end)
