"""`launch`: rebind a kernel to the twins and run every block of the grid."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

import numpy as np
from numba.cuda.dispatcher import CUDADispatcher

from tests.simt.device import Device
from tests.simt.faults import TooEarly
from tests.simt.memory import (
    GLOBAL_ALIGNMENT,
    CheckedArray,
    ReadOnlyArray,
    SharedArray,
    Spread,
    SpreadArray,
    awaited,
)
from tests.simt.threads import Block, Dim3
from tests.simt.twins import twins_of

BLOCKS_AT_ONCE = 4


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[Any],
    *,
    written: Collection[int] = (0,),
    begins_early: bool = False,
    reads_early: Collection[int] = (),
    seed: int = 0,
) -> None:
    """Run `kernel` over the grid, some blocks at a time, with `threads` threads each.

    NumPy arrays among the arguments are what pointers are on the device: flat, and only those whose
    position is in `written` may be written; a `Spread` stands for one too large to have.
    `begins_early`: what is ahead on the stream may not have ended yet; neither that nor this kernel
    writes the arrays at the positions `reads_early`. `seed` draws the order of blocks, warps and
    lanes; blocks take turns at their barriers. Raises a Fault.
    """
    device = Device()
    rebound = _rebind(kernel, twins_of(device))
    bound = [
        _argument(i, value, i in written and i not in reads_early, device)
        for i, value in enumerate(arguments)
    ]
    if begins_early:
        bound = [
            awaited(one) if isinstance(one, CheckedArray) and i not in reads_early else one
            for i, one in enumerate(bound)
        ]
    order = random.Random(seed)

    def body() -> None:
        # As on the machine: integers wrap around, floats become infinite or NaN, nobody is told.
        with np.errstate(all="ignore"):
            rebound(*bound)
        if begins_early and not device.thread().has_waited:
            raise TooEarly(f"{device.thread()} has ended and never waited for the launch ahead")

    blocks = [Dim3(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    order.shuffle(blocks)
    resident: list[Block] = []
    while blocks or resident:
        if blocks and len(resident) < BLOCKS_AT_ONCE:
            resident.append(Block(blocks.pop(), Dim3(*grid), threads, body, order))
        device.block = order.choice(resident)
        if not device.block.advance():
            resident.remove(device.block)


def _argument(position: int, value: Any, is_written: bool, device: Device) -> Any:
    if isinstance(value, Spread):
        return SpreadArray(f"argument {position}", value, device.thread)
    if not isinstance(value, np.ndarray):
        return value
    array = SharedArray if is_written else ReadOnlyArray
    return array(f"argument {position}", value.reshape(-1), device.thread, GLOBAL_ALIGNMENT)


def _rebind(kernel: Callable[..., Any], twins: Mapping[Any, Any]) -> Callable[..., Any]:
    """Return the same code with the twins in its globals and its closure.

    Device functions it calls are rebound too.
    """
    assert isinstance(kernel, FunctionType)

    def twin(value: Any) -> Any:
        try:
            if value in twins:
                return twins[value]
        except TypeError:  # not hashable, so none of ours
            return value
        if isinstance(value, CUDADispatcher):
            return _rebind(value.py_func, twins)
        return value

    used = set(kernel.__code__.co_names)
    return FunctionType(
        kernel.__code__,
        {
            name: twin(value) if name in used else value
            for name, value in kernel.__globals__.items()
        },
        kernel.__name__,
        kernel.__defaults__,
        tuple(CellType(twin(cell.cell_contents)) for cell in kernel.__closure__ or ()),
    )
