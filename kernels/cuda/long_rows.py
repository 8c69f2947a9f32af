"""Reading a long row by one block of threads, or one warp, at the speed of the second cache.

One after the other, a thread's reads of a row of 128 K numbers take 250 times the latency of the
second cache for a block of 512 threads, and the multiprocessor has 2 KB under way, a tenth of what
keeps its port busy. So loops over a row take `READS` numbers at a time, all read before the first
is worked on:

    for first in range(thread, length, READS * threads):
        read_ahead(numbers, row, first, threads, length)
        for i in range(READS):
            if first + i * threads < length:
                … numbers[i] …

(Scalar reads: a row begins anywhere. Lanes side by side read 128 bytes or more.)
"""

from __future__ import annotations

from numba import cuda

from kernels.cuda.variant import Local, Pointer, Scalar

READS = 4


@cuda.jit(device=True, inline="always")
def read_ahead(
    numbers: Local, source: Pointer, row: Scalar, first: Scalar, step: Scalar, length: Scalar
) -> None:
    """numbers[i] = source[row + first + i · step], i < READS; past the end the row's last again."""
    for i in range(READS):
        numbers[i] = source[row + min(first + i * step, length - 1)]
