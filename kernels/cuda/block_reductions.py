"""What all threads of a block agree on: the largest of integers, whatever the order of threads.

Every thread of the block must call a device function from here, and gets the result. They hold
barriers: on return the shared arrays they were lent may be used again.
"""

from __future__ import annotations

from numba import cuda, float32

from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.variant import Pointer, Scalar

LARGEST_FINITE = float32(3.4028234663852886e38)


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
