"""The threads of several blocks that run together, and what every step needs to know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tests.ptx.memory import BARRIER_BITS, BLOCK_BITS, Lanes, Space
from tests.ptx.meter import Meter
from tests.ptx.program import Program
from tests.ptx.registers import Registers

Array = npt.NDArray[Any]

# Which lanes take part: True for all, or an array that says it of each.
Mask: TypeAlias = Any
Step: TypeAlias = Callable[[Mask], None]

WARP = 32


@dataclass(slots=True)
class Crowd:
    """Some blocks of a launch: `blocks` are (number, x, y, z), each of `program.threads` lanes.

    `parameters` are the bits of the kernel's arguments by name; `grid` blocks on each axis.
    `spaces` are the memories by name, `addresses` where declared variables begin.
    """

    program: Program
    blocks: Sequence[tuple[int, int, int, int]]
    grid: tuple[int, int, int]
    parameters: dict[str, int]
    spaces: dict[str, Space]
    addresses: dict[str, int]
    meter: Meter | None
    registers: Registers = field(init=False)
    numbers: Array = field(init=False)  # of the lanes, over the whole launch
    clocks: Array = field(init=False)
    copies: Array = field(init=False)  # which copy of shared memory is a lane's
    groups: Array = field(init=False)  # of asynchronous copies, closed so far
    everyone: Lanes = field(init=False)
    specials: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        threads, count = self.program.threads, len(self.blocks)
        self.registers = Registers(self.program, threads * count)
        number, *index = (np.array(axis, np.int64) for axis in zip(*self.blocks, strict=True))
        thread = np.arange(threads)
        self.numbers = (number[:, None] * threads + thread).reshape(-1)
        self.clocks = np.repeat(number << BLOCK_BITS, threads)
        self.copies = np.repeat(np.arange(count), threads)
        self.groups = np.zeros(threads * count, np.int64)
        self.everyone = Lanes(self.numbers, self.clocks)

        def lanes(values: Any) -> Array:
            return np.broadcast_to(values, (count, threads)).astype(np.uint32).reshape(-1)

        zero, one = 0, 1
        self.specials = {
            "%tid.x": lanes(thread), "%tid.y": lanes(zero), "%tid.z": lanes(zero),
            "%ntid.x": lanes(threads), "%ntid.y": lanes(one), "%ntid.z": lanes(one),
            "%laneid": lanes(thread % WARP),
        }  # fmt: skip
        for axis, name in enumerate("xyz"):
            self.specials[f"%ctaid.{name}"] = lanes(index[axis][:, None])
            self.specials[f"%nctaid.{name}"] = lanes(self.grid[axis])

    @property
    def size(self) -> int:
        """How many lanes there are."""
        return len(self.numbers)

    def some(self, mask: Mask) -> tuple[Any, Lanes]:
        """Return an index of the lanes that take part, and who they are."""
        if mask is True:
            return slice(None), self.everyone
        index = np.flatnonzero(mask)
        return index, Lanes(self.numbers[index], self.clocks[index])

    def pass_barrier(self, mask: Mask, of_block: bool) -> None:
        """Move the clocks of lanes on."""
        index = slice(None) if mask is True else mask
        clocks = self.clocks[index]
        if of_block:
            self.clocks[index] = ((clocks >> BARRIER_BITS) + 1) << BARRIER_BITS
            if "global" in self.spaces:
                blocks = set((clocks >> BLOCK_BITS).tolist())
                self.spaces["global"].order.pass_barrier(blocks)
        else:
            self.clocks[index] = clocks + 1
