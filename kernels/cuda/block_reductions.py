"""What all threads of a block agree on: the largest of integers, a sum, whatever their order.

Every thread of the block must call a device function from here, and gets the result. They hold
barriers: on return of `block_max` the shared array it was lent may be used again.
"""

from __future__ import annotations

from numba import cuda, float32

from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.lanes import warp_sum
from kernels.cuda.variant import DeviceFunction, Pointer, Scalar

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


def make_block_sum(num_warps: int) -> DeviceFunction:
    """Return block_sum(value, of_warps), of all threads' float32 values.

    Over a warp by a butterfly, over warps in their order. `of_warps`: shared, one a warp, of this
    sum alone: there is one barrier.
    """

    @cuda.jit(device=True, inline="always")
    def block_sum(value: Scalar, of_warps: Pointer) -> Scalar:
        value = warp_sum(value)
        if cuda.threadIdx.x % 32 == 0:
            of_warps[cuda.threadIdx.x // 32] = value
        cuda.syncthreads()
        total = float32(0)
        for warp in range(num_warps):
            total += of_warps[warp]
        return total

    return block_sum
