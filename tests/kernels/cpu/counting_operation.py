"""An operation whose effect shows which chunks ran, how often and after what."""

from __future__ import annotations

from numba import carray

from kernels.cpu.compiled import int64_at, operation, word
from kernels.cpu.operation import FIRST_OPERAND

COUNTS = FIRST_OPERAND
BEFORE = FIRST_OPERAND + 1
NUM_BEFORE = FIRST_OPERAND + 2
EARLY = FIRST_OPERAND + 3
NUM_PARTS = FIRST_OPERAND + 4


@operation()
def count_chunk(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add 1 to COUNTS[part] of NUM_PARTS; 1 to EARLY[part] if BEFORE holds a part not done yet.

    Chunk c of n has the parts P·c/n to P·(c+1)/n − 1.
    """
    parts = word(record, NUM_PARTS)
    counts = carray(int64_at(word(record, COUNTS)), (parts,))
    early = carray(int64_at(word(record, EARLY)), (parts,))
    before = carray(int64_at(word(record, BEFORE)), (word(record, NUM_BEFORE),))
    for part in range(parts * chunk // num_chunks, parts * (chunk + 1) // num_chunks):
        for i in range(before.shape[0]):
            if before[i] <= counts[part]:
                early[part] += 1
        counts[part] += 1
