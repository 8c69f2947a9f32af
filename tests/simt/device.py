"""The twin of `numba.cuda` inside one launch.

`Device` has what our kernels use and nothing else, so an unknown function fails as an
AttributeError. Sums and products are those of NumPy scalars, without the fused multiply-add of the
machine.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType
from typing import Any

import numpy as np

from tests.simt.faults import Unsupported
from tests.simt.local_arrays import LocalArray
from tests.simt.memory import SharedArray, poisoned
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
        _only_full(mask, "syncwarp")
        self.warp("syncwarp", sys._getframe(1), None, lambda operands: operands)
        self.thread().warp_barriers += 1

    def shfl_sync(self, mask: int, value: Any, source: int) -> Any:
        """Return `value` of lane `source`."""
        _only_full(mask, "shfl_sync")
        return self.warp(
            "shfl_sync",
            sys._getframe(1),
            (value, int(source)),
            lambda operands: [operands[lane % 32][0] for _, lane in operands],
        )

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        """Return `value` of the lane whose number differs in the bits of `lane_mask`."""
        _only_full(mask, "shfl_xor_sync")
        return self.warp(
            "shfl_xor_sync",
            sys._getframe(1),
            (value, int(lane_mask)),
            lambda operands: [operands[i ^ bits][0] for i, (_, bits) in enumerate(operands)],
        )

    def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
        """Return `value` of the lane `delta` below; a lane that has none there keeps its own."""
        _only_full(mask, "shfl_up_sync")
        return self.warp(
            "shfl_up_sync",
            sys._getframe(1),
            (value, int(delta)),
            lambda operands: [
                operands[i - by if i >= by else i][0] for i, (_, by) in enumerate(operands)
            ],
        )

    def ballot_sync(self, mask: int, predicate: Any) -> np.uint32:
        """Return a word with the bits of the lanes whose predicate is true."""
        _only_full(mask, "ballot_sync")
        return self.warp(
            "ballot_sync",
            sys._getframe(1),
            bool(predicate),
            lambda operands: (
                [np.uint32(sum(1 << i for i, is_set in enumerate(operands) if is_set))]
                * len(operands)
            ),
        )

    def popc(self, word: Any) -> int:
        """Return how many bits are set."""
        return int(word).bit_count()

    def clz(self, value: Any) -> int:
        """Return how many zero bits stand before the first one of a non-negative int64."""
        if not isinstance(value, np.int64) or value < 0:
            raise Unsupported(f"clz of {value!r}, which is no non-negative int64")
        return 64 - int(value).bit_length()

    def warp(self, operation: str, frame: FrameType, operand: Any, function: WarpFunction) -> Any:
        """Wait for all lanes of the warp at this instruction; return this lane's result."""
        thread = self.thread()
        thread.operand = operand
        thread.function = function
        thread.wait(State.WARP, _site(operation, frame))
        return thread.result


class _SharedMemory:
    """`cuda.shared`: one array a place in the source and block, found by whoever comes first."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def array(self, shape: Any, dtype: Any, alignment: int = 0) -> SharedArray:
        site = _site("shared.array", sys._getframe(1))
        arrays = self._device.block.shared
        if site not in arrays:
            name = f"shared memory of line {site.line}"
            values = poisoned(shape, numpy_type(dtype))
            arrays[site] = SharedArray(name, values, self._device.thread, alignment)
        return arrays[site]


class _LocalMemory:
    """`cuda.local`: an array of one thread."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def array(self, shape: Any, dtype: Any) -> LocalArray:
        name = f"local array of line {sys._getframe(1).f_lineno}"
        return LocalArray(name, shape, numpy_type(dtype), self._device.thread)


@functools.cache
def numpy_type(dtype: Any) -> np.dtype:
    """Return the NumPy dtype of a Numba scalar type, or of its twin."""
    return np.dtype(str(dtype)) if not isinstance(dtype, type) else np.dtype(dtype)


def _only_full(mask: int, operation: str) -> None:
    if mask != FULL_WARP:
        raise Unsupported(f"{operation} with mask {mask:#x}: only full warps are modelled")


_sites: dict[tuple[CodeType, int, str], Site] = {}


def _site(operation: str, frame: FrameType) -> Site:
    """Return the place a frame is at; kept, because a kernel passes few places many times."""
    key = (frame.f_code, frame.f_lasti, operation)
    site = _sites.get(key)
    if site is None:
        site = _sites[key] = Site(operation, frame.f_lineno, frame.f_lasti)
    return site
