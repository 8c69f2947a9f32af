"""Every kernel of the CPU engine beside its roofline, on roofs that are measured first.

A kernel's roofline is the longer of two times: to read and write its memory once at the bandwidth
measured for as many bytes, and to do its arithmetic at the peak of the instructions it uses
(Williams, Waterman and Patterson, "Roofline", 2009). Its share is that time over the time it takes.

Imported only once the instruction set is chosen and Numba knows where its cache is.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from compute_plane.cpu.thread_team import ThreadTeam
from hetero_infer.bench.figures import median
from hetero_infer.bench.kernel_cases import KernelCase, all_cases
from hetero_infer.bench.kernel_workbench import Workbench, seconds_of
from hetero_infer.bench.provenance import usable_cpus
from hetero_infer.bench.report import Result, Table
from hetero_infer.bench.roofs import Roofs, measure_roofs
from hetero_infer.bench.settings import KernelSettings
from kernels.cpu.instruction_set import selected_instruction_set
from planes.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A case as it ran: seconds of each sample, and the seconds of its roofline."""

    case: KernelCase
    threads: int
    samples: tuple[float, ...]
    roofline_s: float

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def share(self) -> float:
        """Of the roofline that is reached, 1 at most but for noise."""
        return self.roofline_s / self.seconds

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON."""
        case = self.case
        return {
            "name": case.name,
            "threads": self.threads,
            "bytes": case.num_bytes,
            "operations": case.num_operations,
            "peak": case.peak,
            "seconds": self.seconds,
            "bytes_per_second": case.num_bytes / self.seconds,
            "operations_per_second": case.num_operations / self.seconds,
            "roofline_seconds": self.roofline_s,
            "share": self.share,
            "samples": list(self.samples),
        }


def run(settings: KernelSettings) -> Result:
    """Measure roofs, then kernels; raises EngineError."""
    cases = matching(all_cases(), settings.only)
    most = settings.num_threads or usable_cpus()
    with ExitStack() as stack:
        benches = [_workbench(stack, n) for n in sorted({1, most})]
        samples = [
            sample
            for bench in benches
            for sample in measure_roofs(
                bench, settings.read_sizes, seconds=settings.seconds, repeat=settings.repeat
            )
        ]
        roofs = Roofs(samples)
        times = [_measure(case, bench, roofs, settings) for case in cases for bench in benches]
    chosen = selected_instruction_set()
    data = {
        "instruction_set": chosen.name,
        "roofs": [sample.to_object() for sample in samples],
        "results": [time.to_object() for time in times],
    }
    return Result(f"instruction set {chosen.name}", data, [_roof_table(roofs), _table(times)])


def matching(cases: Sequence[KernelCase], pattern: str) -> list[KernelCase]:
    """Return the cases whose names match. Raises ConfigError if there are none."""
    found = [case for case in cases if fnmatch.fnmatchcase(case.name, pattern)]
    if not found:
        names = ", ".join(sorted({case.name.split()[0] for case in cases}))
        raise ConfigError(
            f"only: no case matches {pattern!r}; they begin with {names}", field="only"
        )
    return found


def _workbench(stack: ExitStack, num_threads: int) -> Workbench:
    """Return a workbench that is kept until the threads of its team have ended."""
    bench = Workbench(ThreadTeam(num_threads))
    stack.callback(bench.team.close)
    return bench


def _measure(
    case: KernelCase, bench: Workbench, roofs: Roofs, settings: KernelSettings
) -> KernelTime:
    entries = case.prepare(bench)
    samples = seconds_of(bench.team, entries, seconds=settings.seconds, repeat=settings.repeat)
    bench.clear()
    threads = bench.team.num_threads
    roofline_s = roofs.seconds(case.num_bytes, case.num_operations, case.peak, threads)
    return KernelTime(case, threads, tuple(samples), roofline_s)


def _roof_table(roofs: Roofs) -> Table:
    rows = []
    for sample in roofs.samples:
        size = f" {sample.num_bytes >> 20} MiB" if sample.num_bytes else ""
        unit = "GB/s" if sample.name == "read" else "Gop/s"
        rows.append(
            [
                sample.name + size,
                str(sample.threads),
                f"{sample.best / 1e9:.1f} {unit}",
                f"{median(sample.rates) / 1e9:.1f} {unit}",
            ]
        )
    return Table(["roof", "threads", "best", "median"], rows, "What this machine can do:")


def _table(times: Sequence[KernelTime]) -> Table:
    rows = [
        [
            time.case.name,
            str(time.threads),
            f"{1e6 * time.seconds:.1f}",
            f"{time.case.num_bytes / time.seconds / 1e9:.1f}",
            f"{time.case.num_operations / time.seconds / 1e9:.0f}",
            time.case.peak or "read",
            f"{100 * time.share:.0f} %",
        ]
        for time in times
    ]
    return Table(
        ["kernel", "threads", "µs", "GB/s", "Gop/s", "held against", "of its roofline"], rows
    )
