"""`launch`: run a kernel's PTX over a grid, arrays for pointers."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.accesses import smallest_access
from tests.ptx.early import refuse_left
from tests.ptx.faults import Unsupported
from tests.ptx.lanes import WARP, Crowd
from tests.ptx.machine import Machine
from tests.ptx.memory import GAP, Piece, Space, lay_out
from tests.ptx.meter import Meter
from tests.ptx.program import SIZES, Program, parse
from tests.ptx.registers import find_unwritten
from tests.simt.memory import Spread

Array = npt.NDArray[Any]

# So many lanes run together: enough that a step's own cost hardly counts.
LANES_AT_ONCE = 4096

# Where the first buffer lies: far above 32 bits, so that an address cut off is out of bounds.
FIRST_GLOBAL = 0x7F4C_0000_0000
FIRST_SHARED = 1024  # the system keeps what is below
GLOBAL_ALIGNMENT, SHARED_ALIGNMENT = 256, 16

_SCALARS = {"f32": "<f", "f64": "<d", "u32": "<i", "s32": "<i", "u64": "<q", "s64": "<q"}


@lru_cache(maxsize=64)
def read_program(text: str) -> Program:
    """Parse a text and look for registers that are read and never written. Raises a Fault."""
    program = parse(text)
    if program.threads % WARP:
        raise Unsupported(f"{program.threads} threads a block: no whole warps")
    find_unwritten(program)
    return program


def launch(
    text: str,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    *,
    written: Collection[int] = (0,),
    begins_early: bool = False,
    reads_early: Collection[int] = (),
    meter: Meter | None = None,
) -> None:
    """Run the kernel of a PTX text over a grid, in place.

    NumPy arrays among the arguments stand for pointers to their first element, a `Spread` for one
    too large to have; the same array twice is one buffer. Only those whose position is in `written`
    may be written, and they are, when all blocks have run. `begins_early`: what is ahead on the
    stream may not have ended yet; neither that nor this kernel writes the arrays at the positions
    `reads_early`.
    `meter` counts what is done. Raises a Fault.
    """
    program = read_program(text)
    if len(arguments) != len(program.parameters):
        raise Unsupported(f"{len(arguments)} arguments for {len(program.parameters)} parameters")
    global_space, starts = _global_space(program, arguments, written, reads_early)
    values = {
        name: _bits(kind, starts.get(i, argument))
        for i, ((name, kind), argument) in enumerate(
            zip(program.parameters.items(), arguments, strict=True)
        )
    }
    shared = [variable for variable in program.variables.values() if variable.space == "shared"]
    sizes = [(variable.name, variable.size, True) for variable in shared]
    alignment = max([SHARED_ALIGNMENT, *(variable.alignment for variable in shared)])
    pieces = lay_out(sizes, FIRST_SHARED, alignment)
    addresses = {piece.name: piece.address for piece in pieces}
    blocks = [
        (x + grid[0] * (y + grid[1] * z), x, y, z)
        for z in range(grid[2])
        for y in range(grid[1])
        for x in range(grid[0])
    ]
    if begins_early:
        global_space.to_wait = np.ones(len(blocks) * program.threads, np.bool_)
    at_once = max(LANES_AT_ONCE // program.threads, 1)
    granule = smallest_access(program.instructions, "shared")
    for first in range(0, len(blocks), at_once):
        some = blocks[first : first + at_once]
        shared_space = Space("shared", pieces, granule, len(some), is_known=False)
        spaces = {"global": global_space, "shared": shared_space}
        Machine(Crowd(program, some, grid, values, spaces, addresses, meter)).run()
    refuse_left(global_space)
    first_at: dict[int, int] = {}
    for i in sorted(starts):
        first_at.setdefault(starts[i], i)
    for i in written:
        name = f"argument {first_at[starts[i]]}"
        _exchange(global_space, _as_spread(i, arguments[i]), name, is_read=True)


def _global_space(
    program: Program,
    arguments: Sequence[Any],
    written: Collection[int],
    given: Collection[int],
) -> tuple[Space, dict[int, int]]:
    """Return global memory with the arrays in it, and where each pointer argument points."""
    spreads = {i: _as_spread(i, x) for i, x in enumerate(arguments) if not np.isscalar(x)}
    first_of: dict[int, int] = {}  # of an array's first byte → the first argument that has it
    owner = {
        i: first_of.setdefault(spread.values.__array_interface__["data"][0], i)
        for i, spread in spreads.items()
    }
    are_given = {owner[i] for i in given}
    may_write = {owner[i] for i in written} - are_given
    pieces: list[Piece] = []
    starts: dict[int, int] = {}
    address, offset = FIRST_GLOBAL, 0
    for i in sorted(set(owner.values())):
        spread = spreads[i]
        starts[i] = address
        size = spread.values.nbytes // len(spread.starts)
        for start in spread.starts:
            at = starts[i] + start * spread.values.itemsize
            pieces.append(Piece(f"argument {i}", at, size, offset, i in may_write, i in are_given))
            offset = _aligned(offset + size + GAP)
            address = max(address, _aligned(at + size + GAP))
    space = Space(
        "global", pieces, smallest_access(program.instructions, "global"), 1, is_known=True
    )
    for i in starts:
        _exchange(space, spreads[i], f"argument {i}", is_read=False)
    return space, {i: starts[one] for i, one in owner.items()}


def _as_spread(position: int, argument: Any) -> Spread:
    spread = argument if isinstance(argument, Spread) else Spread(argument, (0,))
    if not spread.values.flags.c_contiguous:
        raise Unsupported(f"argument {position} is not contiguous")
    return spread


def _exchange(space: Space, spread: Spread, name: str, *, is_read: bool) -> None:
    """Copy an argument's pieces into the space, or back."""
    pieces = [piece for piece in space.pieces if piece.name == name]
    rows = spread.values.reshape(len(pieces), -1).view(np.uint8)
    for row, piece in zip(rows, pieces, strict=True):
        place = space.bytes[piece.offset : piece.offset + piece.size]
        if is_read:
            row[...] = place
        else:
            place[...] = row


def _aligned(place: int) -> int:
    return -(-place // GLOBAL_ALIGNMENT) * GLOBAL_ALIGNMENT


def _bits(kind: str, value: Any) -> int:
    packed = struct.pack(_SCALARS[kind], float(value) if kind[0] == "f" else int(value))
    return int.from_bytes(packed[: SIZES[kind]], "little")
