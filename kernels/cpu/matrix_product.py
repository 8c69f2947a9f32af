"""What all matrix products have in common: what their operands mean, and how sums get out.

A product is OUT[first + r, n] = Σ_k INPUT[r, k] · WEIGHTS[n, k], or added to OUT. Which formats of
rows and of weights it takes is its operation's matter (`int8_products`, `float_products`).

    INPUT    M rows of K elements, C-contiguous, as `row_inputs` writes them:
             int8 rows      q int8 [M, K] at INPUT, and beside it, for each group of 32 elements,
                            INPUT_SCALES float32 [M, K/32], INPUT_SCALED_SUMS float32 [M, K/32]
                            (scale · Σ q), INPUT_SUMS int16 [M, K/16] (Σ q of halves) and
                            INPUT_BEGINS int32 [M, K/32] (`int8_tile`); where the set makes two
                            products of one, INPUT_PAIR_SUMS int32 [M, K/32] (`int8_pair_tile`)
             bfloat16 rows  uint16 [M, K]
             float32 rows   float32 [M, K]
    WEIGHTS  N columns in panels of 16 (`int8_packing`, `float_packing`)
    OUT      float32, rows OUT_STRIDE elements apart; columns from N on are never touched

The words are `kernels.cpu.operands.Product`.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types

from kernels.cpu.compiled import inlined
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import (
    F32,
    F32X,
    LANES,
    Builder,
    Value,
    counted_loop,
    i64,
    load,
    offset,
    store,
)

SHARE_BITS: Final = 16
"""Fractions of a group of k's are counted in 2^-16."""


@inlined()
def num_tiles(rows: int, most: int) -> int:
    """Return the fewest tiles of at most `most` rows that hold so many."""
    return (rows + most - 1) // most


@inlined()
def tile_rows(left: int, most: int) -> int:
    """Return the rows of the next tile of those left: the fewest tiles that hold them are equal.

    Each tile goes through the weights once more: three rows by two tiles take as long as four.
    """
    tiles = num_tiles(left, most)
    return (left + tiles - 1) // tiles


def sums_writer(panels: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return `emit_sums` for so many panels: void(sums, rows, columns, out, stride, accumulate)."""

    def write(builder: Builder, *operands: Value) -> None:
        emit_sums(builder, panels, *operands)

    return emitted(types.void, *[types.int64] * 6)(write)


def emit_sums(
    builder: Builder, panels: int, sums: Value, rows: Value, columns: Value, out: Value,
    stride: Value, accumulate: Value,
) -> None:  # fmt: skip
    """Emit how a tile's sums get out.

    sums: address of float32 [rows, panels · 16]. They are written to the first `columns` columns of
    rows of OUT, `stride` elements apart, or added to them; those of all panels, if it is more.
    """
    is_added = builder.icmp_signed("!=", accumulate, i64(0))

    def write_part(kind: ir.Type, source: Value, target: Value) -> None:
        value = load(builder, source, kind)
        with builder.if_else(is_added) as (then, otherwise):
            with then:
                store(builder, builder.fadd(load(builder, target, kind), value), target)
            with otherwise:
                store(builder, value, target)

    def write_panel(panel: int, source: Value, target: Value) -> None:
        left = builder.sub(columns, i64(panel * LANES))
        is_whole = builder.icmp_signed(">=", left, i64(LANES))
        with builder.if_else(is_whole, likely=True) as (then, otherwise):
            with then:
                write_part(F32X, source, target)
            with otherwise:

                def one(column: Value) -> None:
                    right = builder.shl(column, i64(2))
                    places = [offset(builder, at, right) for at in (source, target)]
                    write_part(F32, *places)

                counted_loop(builder, left, one)

    def write_row(row: Value) -> None:
        source = offset(builder, sums, builder.mul(row, i64(4 * LANES * panels)))
        target = offset(builder, out, builder.shl(builder.mul(row, stride), i64(2)))
        for panel in range(panels):
            right = 4 * LANES * panel
            write_panel(panel, offset(builder, source, right), offset(builder, target, right))

    counted_loop(builder, rows, write_row)
