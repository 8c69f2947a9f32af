"""Where the time of a decode step goes: its kernels, the pauses between, what a launch costs.

`engine_steps` says how long a step takes beside what it must read. This says which of its kernels,
and how many microseconds between them, are to blame for the rest.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.gpu.device import as_graph, milliseconds

LAUNCHES: Final = 512
"""Kernels of a chain that shows what one costs."""
WAITS: Final = 20
"""Waits for a device at work, of each kind."""
WORK_CYCLES: Final = 1_000_000
"""Of the device's clock; half a millisecond or more."""
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


def launch_costs(device: str) -> dict[str, float]:
    """Return what a kernel that does next to nothing costs in a chain of such, and a wait, in µs.

    `graph_us`, `stream_us`: one of a chain, of which each needs the one before, in a graph and
    launched one by one. `spinning_wait_us`, `blocking_wait_us`: from the launch of half a
    millisecond's work to the return of either wait for it; their difference is what waking costs.
    """
    import torch

    number = torch.zeros(1, device=device)

    def chain() -> None:
        for _ in range(LAUNCHES):
            number.add_(1)

    def of_one(queue_work: Callable[[], None]) -> float:
        return statistics.median(milliseconds(queue_work, 9)) * 1e3 / LAUNCHES

    costs = {"graph_us": of_one(as_graph(chain, device)), "stream_us": of_one(chain)}
    for name, blocks in (("spinning_wait_us", False), ("blocking_wait_us", True)):
        costs[name] = statistics.median(_wait_us(blocks) for _ in range(WAITS))
    return costs


def _wait_us(blocks: bool) -> float:
    """Return how long it takes until a wait for the device's work returns."""
    import torch

    done = torch.cuda.Event(blocking=blocks)
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(WORK_CYCLES)  # torch's own tests measure so: nothing public does that
    done.record()
    done.synchronize()
    return (time.perf_counter() - began) * 1e6
