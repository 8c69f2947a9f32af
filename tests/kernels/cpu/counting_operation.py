"""An operation whose effect shows which chunks ran, how often and after what."""

from __future__ import annotations

from numba import carray

from kernels.cpu.operation import FIRST_OPERAND, int64_at, operation, word

COUNTS = FIRST_OPERAND
BEFORE = FIRST_OPERAND + 1
NUM_BEFORE = FIRST_OPERAND + 2
EARLY = FIRST_OPERAND + 3


@operation()
def count_chunk(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add 1 to COUNTS[chunk]; add 1 to EARLY[chunk] if BEFORE holds a chunk not done yet."""
    counts = carray(int64_at(word(record, COUNTS)), (num_chunks,))
    early = carray(int64_at(word(record, EARLY)), (num_chunks,))
    before = carray(int64_at(word(record, BEFORE)), (word(record, NUM_BEFORE),))
    for i in range(before.shape[0]):
        if before[i] <= counts[chunk]:
            early[chunk] += 1
    counts[chunk] += 1
