"""Products of bfloat16 rows with bfloat16 weights in the AMX tile registers.

TDPBF16PS multiplies a tile of 16 rows × 32 k's with one of 32 k's × 16 columns and adds the result
to a tile of 16 × 16 float32, in 16 cycles: sixteen times what vectors do. A packed BF16 panel is a
column of such weight tiles already, 16 vectors of pairs each (`kernels.cpu.float_packing`).

    registers        weights 6    weights 7         two of each: an operand that is loaded is used
                     │ panel 0 │  │ panel 1 │       twice, which is what the cache can keep up with
    rows 4   x ────▶ │ sums 0  │  │ sums 1  │       rows 0–15 of the block
    rows 5   x ────▶ │ sums 2  │  │ sums 3  │       rows 16–31, where there are more than 16

A tile register has up to 16 rows, as configured: a block of fewer rows is computed by the same
instructions, so a row's bits are the same in any block. What TDPBF16PS does with one row, column
and 32 k's is fixed: the first numbers of all pairs are one chain of fused multiply-adds, the second
ones another, then both are added, and the result to the sum; subnormal numbers count as zero.

What was tried (one core of a Sapphire Rapids server, 256 rows, K 576, N 512, random numbers):

    loading both weights and both rows, then multiplying              1.38 TFLOP/s
    each multiplication right behind its second operand               1.50
    and after every 10 k tiles on to the next panels, so that the
    rows stay in the first-level cache                                1.59
    software prefetch of weights, rows or output; rows copied into
    contiguous tiles                                                  slower
    one block again and again, all of it in the first-level cache     2.2
    multiplications alone, no operand ever loaded                     3.15

That turning after 10 k tiles was given up once longer rows were looked at: with parts as
`bf16_amx_product` has them it takes 1.1 to 1.2 times as long, at K 576 too (another server).

All of these are a fifth faster on zeros: measure with numbers. Wide outputs are bound by memory:
N 3072 writes 3 MB and reads 4 MB for 0.9 GFLOP, and runs at 1.35.
"""

from __future__ import annotations

from typing import Any, Final

from numba import types

from kernels.cpu.amx_tiles import (
    clear_tile,
    configure,
    load_tile,
    multiply_tiles,
    store_tile,
)
from kernels.cpu.emitted import emitted
from kernels.cpu.float_sizes import BLOCK_PANELS, ROW_BYTES, TILE_BYTES, TILE_ROWS
from kernels.cpu.vector_ir import (
    Builder,
    Value,
    counted_loop,
    i64,
    offset,
)

SUMS: Final = 0
ROWS: Final = 4
WEIGHTS: Final = 6
NUM_REGISTERS: Final = 8


@emitted(types.void, types.int64)
def configure_tiles(builder: Builder, rows: Value) -> None:
    """Set up the tile registers of this thread for blocks of `rows` rows, 1 to 32."""
    full = i64(TILE_ROWS)
    upper = builder.select(builder.icmp_signed("<", rows, full), rows, full)
    below = builder.sub(rows, upper)
    # A register of no rows is a fault; without second rows the second registers go unused.
    lower = builder.select(builder.icmp_signed(">", below, i64(0)), below, i64(1))
    counts = [upper, upper, lower, lower, upper, lower, full, full]
    configure(builder, {number: (count, ROW_BYTES) for number, count in enumerate(counts)})


def _multiply_part(
    builder: Builder, row_tiles: int, x: Value, stride: Value, panels: list[Value]
) -> None:
    """Multiply one k tile of a block: each multiplication right behind its second operand."""
    for r in range(row_tiles):
        rows = offset(builder, x, *[builder.mul(stride, i64(TILE_ROWS))] * r)
        load_tile(builder, ROWS + r, rows, stride)
        for p in range(BLOCK_PANELS):
            if r == 0:
                load_tile(builder, WEIGHTS + p, panels[p], i64(ROW_BYTES))
            numbers = (SUMS + BLOCK_PANELS * r + p, ROWS + r, WEIGHTS + p)
            multiply_tiles(builder, "tdpbf16ps", *numbers)


def _block(row_tiles: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(x, row_stride, depth, tail, weights, second, before, sums, sums_stride).

    It adds a block's products over some k's to the sums so far.

    x: address of the block's rows, bfloat16, from the first of these k's on, row_stride bytes
    apart. depth: k tiles. tail: address of the rows' k's behind them, 32 a row, filled up with
    zeros; or 0. weights: address of the first panel's tile, second: bytes from there to the second
    panel's.
    before: address of the sums so far, rows of 32 float32; 0 for none. sums: where the new ones go,
    rows sums_stride bytes apart.
    """
    cells = [(r, p) for r in range(row_tiles) for p in range(BLOCK_PANELS)]

    def emit(
        builder: Builder, x: Value, row_stride: Value, depth: Value, tail: Value,
        weights: Value, second: Value, before: Value, sums: Value, sums_stride: Value,
    ) -> None:  # fmt: skip
        def place(base: Value, stride: Value, r: int, p: int) -> Value:
            down = [builder.mul(stride, i64(TILE_ROWS))] * r
            return offset(builder, base, *down, ROW_BYTES * p)

        block_stride = i64(ROW_BYTES * BLOCK_PANELS)
        with builder.if_else(builder.icmp_signed("==", before, i64(0))) as (fresh, continued):
            with fresh:
                for r, p in cells:
                    clear_tile(builder, SUMS + BLOCK_PANELS * r + p)
            with continued:
                for r, p in cells:
                    at = place(before, block_stride, r, p)
                    load_tile(builder, SUMS + BLOCK_PANELS * r + p, at, block_stride)

        def panels_at(index: Value) -> list[Value]:
            down = builder.mul(index, i64(TILE_BYTES))
            first = offset(builder, weights, down)
            return [first, offset(builder, first, second)]

        def body(index: Value) -> None:
            rows = offset(builder, x, builder.mul(index, i64(ROW_BYTES)))
            _multiply_part(builder, row_tiles, rows, row_stride, panels_at(index))

        counted_loop(builder, depth, body)
        with builder.if_then(builder.icmp_signed("!=", tail, i64(0)), likely=False):
            _multiply_part(builder, row_tiles, tail, i64(ROW_BYTES), panels_at(depth))
        for r, p in cells:
            at = place(sums, sums_stride, r, p)
            store_tile(builder, SUMS + BLOCK_PANELS * r + p, at, sums_stride)

    emit.__name__ = f"bf16_amx_{row_tiles}"
    return emitted(types.void, *[types.int64] * 9)(emit)


one_row_tile = _block(1)
"""A block of 1 to 16 rows."""
two_row_tiles = _block(2)
"""A block of 17 to 32 rows."""
