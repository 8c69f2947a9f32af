"""Which lane of which warp a thread is, what the lanes of a warp add up to, and their largest."""

from __future__ import annotations

from numba import cuda, int32

from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.variant import Scalar, Scalars


@cuda.jit(device=True, inline="always")
def lane_and_warp() -> Scalars:
    """Return the thread's lane and warp, int32, of a one-dimensional block of whole warps.

    The warp goes from lane 0 to all: so the compiler knows that a warp does not part over it.
    """
    thread = cuda.threadIdx.x
    return int32(thread & 31), int32(cuda.shfl_sync(FULL_WARP, thread >> 5, 0))


@cuda.jit(device=True, inline="always")
def warp_sum(value: Scalar) -> Scalar:
    """Return the sum of all lanes' values, the same in all of them: a butterfly, halves first."""
    for step in range(5):
        value += cuda.shfl_xor_sync(FULL_WARP, value, 16 >> step)
    return value


@cuda.jit(device=True, inline="always")
def warp_max(value: Scalar) -> Scalar:
    """Return the largest of all lanes' values, the same in all of them."""
    for step in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 16 >> step))
    return value


@cuda.jit(device=True, inline="always")
def sum_up_to_lane(value: Scalar) -> Scalar:
    """Return the sum of the values of this lane and those below."""
    lane = cuda.threadIdx.x % 32
    for step in range(5):
        lower = cuda.shfl_up_sync(FULL_WARP, value, 1 << step)
        if lane >= 1 << step:
            value += lower
    return value
