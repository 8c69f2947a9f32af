"""What this machine can do at most, measured: reading memory, and arithmetic of each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetero_infer.bench.figures import median
from hetero_infer.bench.kernel_workbench import Workbench, seconds_of
from hetero_infer.bench.roof_kernels import (
    OPERAND_BYTES,
    OUT_BYTES,
    READ_AT_ONCE,
    SET,
    TILE_DEPTH_BYTES,
    Roof,
    arithmetic_roofs,
    roof_read,
    tile_configuration,
)

ITERATIONS = 2000
"""Of a chunk of an arithmetic roof: some tens of microseconds."""

NEAR_ONE = 0.999


@dataclass(frozen=True, slots=True)
class RoofSample:
    """One roof: `name` is `read` or a kind of arithmetic, `rates` in bytes or operations a second.

    `num_bytes`: read again and again, for `read`; else 0.
    """

    name: str
    threads: int
    num_bytes: int
    rates: tuple[float, ...]

    @property
    def best(self) -> float:
        """The roof: what was reached once can be reached."""
        return max(self.rates)

    def to_object(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "name": self.name,
            "threads": self.threads,
            "bytes": self.num_bytes,
            "unit": "bytes/s" if self.name == "read" else "operations/s",
            "best": self.best,
            "median": median(self.rates),
            "samples": list(self.rates),
        }


@dataclass(frozen=True, slots=True)
class Roofs:
    """All roofs of a machine."""

    samples: Sequence[RoofSample]

    def peak(self, name: str, threads: int) -> float:
        """Return the operations a second of a kind of arithmetic."""
        return next(s.best for s in self.samples if (s.name, s.threads) == (name, threads))

    def bandwidth(self, num_bytes: int, threads: int) -> float:
        """Return the bytes a second at which so many bytes are read again and again.

        Between the sizes that were measured it is interpolated over the logarithm of the size.
        """
        reads = sorted(
            (s.num_bytes, s.best) for s in self.samples if s.name == "read" and s.threads == threads
        )
        sizes = [math.log(size) for size, _ in reads]
        place = math.log(max(num_bytes, 1))
        return float(np.interp(place, sizes, [rate for _, rate in reads]))

    def seconds(self, num_bytes: int, num_operations: int, peak: str | None, threads: int) -> float:
        """Return the shortest time for so many bytes and operations: the longer of both."""
        reading = num_bytes / self.bandwidth(num_bytes, threads)
        if peak is None:
            return reading
        return max(reading, num_operations / self.peak(peak, threads))


def measure_roofs(
    bench: Workbench, sizes: Iterable[int], *, seconds: float, repeat: int
) -> list[RoofSample]:
    """Measure all roofs with the threads of a workbench."""
    team = bench.team
    samples = []
    for size in sorted(set(sizes)):
        samples.append(_read(bench, size, seconds=seconds, repeat=repeat))
        bench.clear()
    operands = bench.place(_operands())
    out = bench.zeros(OUT_BYTES * bench.num_chunks)
    header = bench.header({})
    count = ITERATIONS * bench.num_chunks
    for name, (operation, operations) in arithmetic_roofs(SET).items():
        words: dict[int, int] = {Roof.COUNT: count, Roof.OPERANDS: operands, Roof.OUT: out}
        if name in TILE_DEPTH_BYTES:
            words[Roof.TILES] = bench.place(tile_configuration(TILE_DEPTH_BYTES[name]))
        record = bench.record(operation, bench.num_chunks, words)
        times = seconds_of(team, [(record, header)], seconds=seconds, repeat=repeat)
        total = operations * count
        samples.append(RoofSample(name, team.num_threads, 0, tuple(total / time for time in times)))
    return samples


def _read(bench: Workbench, size: int, *, seconds: float, repeat: int) -> RoofSample:
    size = size // READ_AT_ONCE * READ_AT_ONCE
    words: dict[int, int] = {
        Roof.COUNT: size,
        Roof.OPERANDS: bench.zeros(size),
        Roof.OUT: bench.zeros(OUT_BYTES * bench.num_chunks),
    }
    record = bench.record(roof_read, bench.num_chunks, words)
    entries = [(record, bench.header({}))]
    times = seconds_of(bench.team, entries, seconds=seconds, repeat=repeat)
    return RoofSample("read", bench.team.num_threads, size, tuple(size / time for time in times))


def _operands() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return operands that no repetition makes large or subnormal.

    As float32 they are a bit less than 1: a · x + x stays below 1000. Their halves are bfloat16 of
    ordinary size, their bytes are int8.
    """
    return np.full(OPERAND_BYTES // 4, NEAR_ONE, np.float32)
