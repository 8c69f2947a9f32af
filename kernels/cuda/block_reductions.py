"""What all threads of a block agree on: sums, largest values, the largest logit.

Device functions that reduce integers only, whose results do not depend on the order of threads.
Every thread of the block must call them, and gets the result. They hold barriers: on return the
shared arrays they were lent may be used again.
"""

from __future__ import annotations

from numba import cuda, float32, int64

from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.lanes import warp_sum
from kernels.cuda.long_rows import READS, read_ahead
from kernels.cuda.ordered_floats import order_key
from kernels.cuda.variant import Pointer, Scalar, Scalars

LARGEST_FINITE = float32(3.4028234663852886e38)


@cuda.jit(device=True, inline="always")
def block_sum(value: Scalar, of_warps: Pointer) -> Scalar:
    """Return the sum of all threads' int64 values. `of_warps`: shared int64, one a warp."""
    value = warp_sum(value)
    if cuda.threadIdx.x % 32 == 0:
        of_warps[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    total = int64(0)
    for warp in range(cuda.blockDim.x // 32):
        total += of_warps[warp]
    cuda.syncthreads()
    return total


@cuda.jit(device=True, inline="always")
def block_max(value: Scalar, of_warps: Pointer) -> Scalar:
    """Return the largest of all threads' int64 values. `of_warps`: shared int64, one a warp."""
    for step in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 16 >> step))
    if cuda.threadIdx.x % 32 == 0:
        of_warps[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    largest = of_warps[0]
    for warp in range(1, cuda.blockDim.x // 32):
        largest = max(largest, of_warps[warp])
    cuda.syncthreads()
    return largest


@cuda.jit(device=True, inline="always")
def find_largest(logits: Pointer, row: Scalar, vocab: Scalar, of_warps: Pointer) -> Scalars:
    """Return (order key of the largest logit, how many are not finite); all threads get it.

    `logits[row … row + vocab - 1]`, float32. The key also names the token, the lowest id among
    equals (`ordered_floats`). `of_warps`: shared int64, one a warp.
    """
    best, bad = int64(0), int64(0)
    numbers = cuda.local.array(READS, float32)
    for first in range(cuda.threadIdx.x, vocab, READS * cuda.blockDim.x):
        read_ahead(numbers, logits, row, first, cuda.blockDim.x, vocab)
        for i in range(READS):
            v = first + i * cuda.blockDim.x
            if v < vocab:
                if abs(numbers[i]) <= LARGEST_FINITE:  # NaN is not
                    best = max(best, order_key(numbers[i], v))
                else:
                    bad += 1
    return block_max(best, of_warps), block_sum(bad, of_warps)
