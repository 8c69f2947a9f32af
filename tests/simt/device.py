"""The twins: what a kernel's names mean while the simulator runs it.

`Device` stands for `numba.cuda`; it has what our kernels use and nothing else, so an unknown
function fails as an AttributeError. Sums and products are those of NumPy scalars, without the fused
multiply-add of the machine; the special functions are exact where the machine approximates.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import numba
import numpy as np

from kernels.cuda import intrinsics
from tests.simt.faults import Unsupported
from tests.simt.memory import CheckedArray, SharedArray, poisoned
from tests.simt.threads import Block, Dim3, Site, State, Thread, WarpFunction

FULL_WARP = 0xFFFFFFFF


class Device:
    """`numba.cuda` inside one launch. `block` is the one that runs now."""

    def __init__(self) -> None:
        self.block: Block = None  # type: ignore[assignment] # set before any thread runs
        self.shared = _SharedMemory(self)
        self.local = _LocalMemory(self)

    def thread(self) -> Thread:
        """Return the thread that runs now."""
        return self.block.current

    threadIdx = property(lambda self: Dim3(self.thread().index, 0, 0))  # noqa: N815 - CUDA's name
    blockIdx = property(lambda self: self.block.index)  # noqa: N815
    blockDim = property(lambda self: self.block.size)  # noqa: N815
    gridDim = property(lambda self: self.block.grid)  # noqa: N815

    def syncthreads(self) -> None:
        """Wait for all threads of the block."""
        self.thread().wait(State.BARRIER, _site("syncthreads", sys._getframe(1)))

    def syncwarp(self, mask: int = FULL_WARP) -> None:
        """Wait for all lanes of the warp; orders their memory accesses."""
        self._warp("syncwarp", sys._getframe(1), mask, None, lambda operands: operands)
        self.thread().warp_barriers += 1

    def shfl_sync(self, mask: int, value: Any, source: int) -> Any:
        """Return `value` of lane `source`."""
        return self._warp(
            "shfl_sync",
            sys._getframe(1),
            mask,
            (value, int(source)),
            lambda operands: [operands[lane % 32][0] for _, lane in operands],
        )

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        """Return `value` of the lane whose number differs in the bits of `lane_mask`."""
        return self._warp(
            "shfl_xor_sync",
            sys._getframe(1),
            mask,
            (value, int(lane_mask)),
            lambda operands: [operands[i ^ bits][0] for i, (_, bits) in enumerate(operands)],
        )

    def _warp(
        self, operation: str, frame: FrameType, mask: int, operand: Any, function: WarpFunction
    ) -> Any:
        if mask != FULL_WARP:
            raise Unsupported(f"{operation} with mask {mask:#x}: only full warps are modelled")
        thread = self.thread()
        thread.operand = operand
        thread.function = function
        thread.wait(State.WARP, _site(operation, frame))
        return thread.result


class _SharedMemory:
    """`cuda.shared`: one array a place in the source and block, found by whoever comes first."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def array(self, shape: Any, dtype: Any) -> SharedArray:
        site = _site("shared.array", sys._getframe(1))
        arrays = self._device.block.shared
        if site not in arrays:
            name = f"shared memory of line {site.line}"
            values = poisoned(shape, numpy_type(dtype))
            arrays[site] = SharedArray(name, values, self._device.thread)
        return arrays[site]


class _LocalMemory:
    """`cuda.local`: an array of one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def array(self, shape: Any, dtype: Any) -> CheckedArray:
        name = f"local array of line {sys._getframe(1).f_lineno}"
        return CheckedArray(name, poisoned(shape, numpy_type(dtype)), self._device.thread)


def numpy_type(dtype: Any) -> np.dtype:
    """Return the NumPy dtype of a Numba scalar type, or of its twin."""
    return np.dtype(str(dtype)) if not isinstance(dtype, type) else np.dtype(dtype)


def bfloat16_to_float32(bits: np.uint16) -> np.float32:
    """Exact."""
    return np.array([bits], np.uint16).astype(np.uint32).__lshift__(16).view(np.float32)[0]


def float32_to_bfloat16(x: np.float32) -> np.uint16:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = int(np.array([x], np.float32).view(np.uint32)[0])
    if np.isnan(x):
        return np.uint16(0x7FFF)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def float16_to_float32(bits: np.uint16) -> np.float32:
    """Exact."""
    return np.float32(np.array([bits], np.uint16).view(np.float16)[0])


def float32_to_float16(x: np.float32) -> np.uint16:
    """Round to nearest, ties to even."""
    return np.array([x], np.float32).astype(np.float16).view(np.uint16)[0]


# What a kernel's globals and closure may hold → what stands for it here.
TWINS: dict[Any, Any] = {
    intrinsics.exp2: lambda x: np.exp2(np.float32(x)),
    intrinsics.bfloat16_to_float32: bfloat16_to_float32,
    intrinsics.float32_to_bfloat16: float32_to_bfloat16,
    intrinsics.float16_to_float32: float16_to_float32,
    intrinsics.float32_to_float16: float32_to_float16,
    numba.float32: np.float32,
    numba.int32: np.int32,
    numba.int64: np.int64,
}


_sites: dict[tuple[CodeType, int, str], Site] = {}


def _site(operation: str, frame: FrameType) -> Site:
    """Return the place a frame is at; kept, because a kernel passes few places many times."""
    key = (frame.f_code, frame.f_lasti, operation)
    site = _sites.get(key)
    if site is None:
        site = _sites[key] = Site(operation, frame.f_lineno, frame.f_lasti)
    return site
