"""Records, headers and memory for single operations, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.step_headers import SCRATCH_ALIGNMENT
from compute_plane.cpu.thread_team import Entry, ThreadTeam
from compute_plane.memory.huge_pages import huge_page_array
from kernels.cpu.operation import (
    CHUNKS,
    HEADER_WORDS,
    KERNEL,
    RECORD_WORDS,
    Operation,
    StepWord,
)

Array = npt.NDArray[Any]

CHUNKS_PER_THREAD: Final = 8
"""Of an operation whose chunks are of equal size: a thread that starts late does less."""
MAX_ENTRIES: Final = 1 << 12
"""Operations of one timed step at most; more make more steps."""


class Workbench:
    """Everything operations of a benchmark point into; must outlive the team's threads."""

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self.random = np.random.default_rng(0)
        self._data: list[Array] = []
        self._words: list[Array] = []

    def clear(self) -> None:
        """Give the memory back, but for records and headers, which a late thread may still read."""
        self._data.clear()

    @property
    def num_chunks(self) -> int:
        """Chunks for an operation that can be cut anywhere."""
        return self.team.num_threads * CHUNKS_PER_THREAD

    def memory(self, num_bytes: int) -> Array:
        """Return zeroed uint8 memory in huge pages, aligned to 2 MiB; every page is there."""
        array = huge_page_array(num_bytes, purpose="a benchmark")
        array[:: 1 << 12] = 0
        self._data.append(array)
        return array

    def place(self, values: Array) -> int:
        """Copy an array into such memory and return the address."""
        array = self.memory(values.nbytes)
        array[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return int(array.ctypes.data)

    def floats(self, count: int) -> int:
        """Return the address of that many float32, drawn from a normal distribution."""
        return self.place(self.random.standard_normal(count, np.float32))

    def zeros(self, num_bytes: int) -> int:
        """Return the address of that many bytes."""
        return int(self.memory(num_bytes).ctypes.data)

    def record(self, operation: Operation, chunks: int, operands: Mapping[int, int]) -> int:
        """Return the address of a record; the operation is compiled, or loaded, if need be."""
        words = np.zeros(RECORD_WORDS, dtype=np.int64)
        words[KERNEL], words[CHUNKS] = operation.address, chunks
        for at, value in operands.items():
            words[at] = value
        self._words.append(words)
        return int(words.ctypes.data)

    def header(self, words: Mapping[int, int], *, scratch_bytes: int = 0) -> int:
        """Return the address of a step header, with scratch memory for each worker."""
        header = np.zeros(HEADER_WORDS, dtype=np.int64)
        if scratch_bytes:
            size = -(-scratch_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
            header[StepWord.SCRATCH] = self.zeros(size * self.team.num_threads)
            header[StepWord.SCRATCH_BYTES] = size
        for at, value in words.items():
            header[at] = value
        self._words.append(header)
        return int(header.ctypes.data)


def seconds_of(
    team: ThreadTeam, entries: Sequence[Entry], *, seconds: float, repeat: int
) -> list[float]:
    """Return `repeat` samples of the time `entries` take, each measured over `seconds`, about."""
    one = np.asarray(entries, dtype=np.int64).reshape(-1, 2)
    many = np.tile(one, (max(1, MAX_ENTRIES // len(one)), 1))
    count = 1
    while True:
        elapsed = _time(team, one, many, count)
        if elapsed >= seconds / 8:
            break
        count *= 4 if elapsed < seconds / 64 else 2
    count = max(1, round(count * seconds / elapsed))
    return [_time(team, one, many, count) / count for _ in range(repeat)]


def _time(team: ThreadTeam, one: Array, many: Array, count: int) -> float:
    """Return the time of `count` repetitions of `one`, in steps as long as `many`."""
    in_a_step = len(many) // len(one)
    steps, rest = divmod(count, in_a_step)
    began = time.perf_counter()
    for _ in range(steps):
        team.run(many)
    if rest:
        team.run(many[: rest * len(one)])
    return time.perf_counter() - began
