"""Tile registers for products of int8 rows: their shapes, what is loaded into them, unpacking.

A unit (`kernels.cpu.int8_amx`) multiplies 16 rows × 32 bytes with 8 rows × 64 bytes, four k's of 16
columns each. There are two registers of each kind, for every other unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import types

from kernels.cpu.amx_tiles import configure
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_sizes import BLOCK_ROWS, TILE_BYTES
from kernels.cpu.int8_weights import tile_of, weights_of_tiles
from kernels.cpu.vector_ir import (
    BYTES,
    F32X,
    I64,
    Builder,
    Value,
    constant,
    counted_loop,
    i64,
    offset,
    store,
)

SUMS, ROWS, WEIGHTS = 0, 2, 4
"""Tile registers: integers, rows and weights of every other unit."""
llvmlite.binding.initialize_native_asmparser()


@emitted(types.void)
def configure_tiles(builder: Builder) -> None:
    """Set up this thread's tile registers: 16 rows of 32 bytes times 8 rows of 64 bytes."""
    kinds = {SUMS: (BLOCK_ROWS, VECTOR_BYTES), ROWS: (BLOCK_ROWS, GROUP)}
    kinds[WEIGHTS] = (GROUP // 4, VECTOR_BYTES)
    configure(builder, {first + turn: kinds[first] for first in kinds for turn in (0, 1)})


def unpacker(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(panel, groups, tiles): unpack a panel's nibbles into tiles of int8."""

    def unpack(builder: Builder, panel: Value, groups: Value, tiles: Value) -> None:
        def one(group: Value) -> None:
            unpack_tile(builder, fmt, panel, groups, group, tiles)

        counted_loop(builder, groups, one)

    unpack.__name__ = f"unpack_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 3)(unpack)


def unpack_tile(
    builder: Builder, fmt: Int8Format, panel: Value, groups: Value, group: Value, tiles: Value
) -> None:
    """Unpack one tile of a panel."""
    packed = tile_of(builder, fmt, panel, groups, group)
    tile = offset(builder, tiles, builder.mul(group, i64(TILE_BYTES)))
    # All are loaded before the first is stored, which might be where others lie.
    chosen = selected_instruction_set()
    for k, [unpacked] in list(weights_of_tiles(builder, [packed], 0, chosen)):
        signed = builder.sub(unpacked, constant(BYTES, fmt.offset))
        store(builder, signed, offset(builder, tile, k * PANEL_COLUMNS))


class RowBroadcasts:
    """Float32 of 16 rows, `stride` bytes apart, each in all lanes.

    The addresses are base + stride · row, with four multiples of the stride and the factors 1, 2
    and 4 of an address, in assembly: LLVM would keep an address a row, for want of registers in
    memory.
    """

    FACTORS: Final = ((0, 1), (1, 1), (1, 2), (3, 1), (1, 4), (5, 1), (3, 2), (7, 1))
    """Row r of a half is at multiple · factor strides."""

    def __init__(self, builder: Builder, stride: Value) -> None:
        self.strides = {n: builder.mul(stride, i64(n)) for n in (1, 3, 5, 7)}
        self.half = builder.shl(stride, i64(3))

    def of_rows(self, builder: Builder, base: Value) -> Callable[[int], Value]:
        """Return what loads the float of row r, base being the address of row 0's."""
        halves = (base, builder.add(base, self.half))

        def of_row(r: int) -> Value:
            half = halves[r // len(self.FACTORS)]
            multiple, factor = self.FACTORS[r % len(self.FACTORS)]
            if multiple:
                kind = ir.FunctionType(F32X, [I64, I64])
                text, constraint = f"vbroadcastss ($1,$2,{factor}), $0", "=v,r,r"
                vector = builder.asm(kind, text, constraint, [half, self.strides[multiple]], False)
            else:
                kind = ir.FunctionType(F32X, [I64])
                vector = builder.asm(kind, "vbroadcastss ($1), $0", "=v,r", [half], False)
            vector.attributes.add("readonly")
            return vector

        return of_row


def add_product(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """Return fma(x, y, total) in the register of total.

    LLVM would take the register of x, and so have 16 sums to move, and some to spill, every turn.
    """
    kind = ir.FunctionType(F32X, [F32X, F32X, F32X])
    added = builder.asm(kind, "vfmadd231ps $3, $2, $0", "=v,0,v,v", [total, x, y], False)
    added.attributes.add("readnone")
    return added
