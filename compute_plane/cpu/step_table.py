"""Operation records in memory: the table that a team of threads walks through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from compute_plane.memory.sizing import available_memory_bytes
from kernels.cpu.board import MAX_CHUNKS
from kernels.cpu.load_ahead import WORKER_BYTES, load_all
from kernels.cpu.operation import (
    CHUNKS,
    FETCH,
    FETCH_BYTES,
    KERNEL,
    RECORD_WORDS,
    Operation,
    StepWord,
)

Words = npt.NDArray[np.int64]


def num_compilers(num_threads: int) -> int:
    """Return how many processes may compile beside this one, 0 if there is no memory for any."""
    free_bytes = available_memory_bytes()
    return num_threads if free_bytes is None else min(num_threads, free_bytes // WORKER_BYTES)


class StepTable:
    """Records, each at an address that stays, and the arrays their operands point into."""

    def __init__(self) -> None:
        self._records: list[Words] = []
        self._reads: list[tuple[int, int] | None] = []
        self._operations: list[Operation] = []  # of each record
        self._kept: list[object] = []

    def add(
        self,
        operation: Operation,
        chunks: int | StepWord,
        operands: Mapping[int, int],
        reads: tuple[int, int] | None = None,
    ) -> int:
        """Append a record and return its address.

        `chunks`: a number, or the header word that holds it. `operands`: word → value; words that
        are not named are 0. `reads`: address and bytes of the weights it reads, if any. The record
        can be run once `load` was called.
        """
        record = np.zeros(RECORD_WORDS, dtype=np.int64)
        record[CHUNKS] = -int(chunks) if isinstance(chunks, StepWord) else min(chunks, MAX_CHUNKS)
        for at, value in operands.items():
            record[at] = value
        self._records.append(record)
        self._reads.append(reads)
        self._operations.append(operation)
        return int(record.ctypes.data)

    def load(self, others: Iterable[Operation], num_threads: int) -> None:
        """Load the operations of all records, and others with them. Raises ConfigError.

        What is not kept is compiled, all together, by as many processes as the plane has threads
        and there is memory for.
        """
        load_all([*self._operations, *others], num_compilers(num_threads))
        for record, operation in zip(self._records, self._operations, strict=True):
            record[KERNEL] = operation.address

    def fetch_ahead(self) -> None:
        """Let threads that wait for a record fetch the weights of the next one that reads any.

        Records run in the order in which they were added; behind the last comes the first.
        """
        ahead = next((reads for reads in self._reads if reads is not None), (0, 0))
        for record, reads in zip(reversed(self._records), reversed(self._reads), strict=True):
            record[FETCH], record[FETCH_BYTES] = ahead
            ahead = reads or ahead

    def keep(self, thing: object) -> None:
        """Keep alive what operands point to."""
        self._kept.append(thing)

    @property
    def num_records(self) -> int:
        """Records of the table."""
        return len(self._records)
