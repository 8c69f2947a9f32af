"""Up to 16 rows with bfloat16 weights in the AMX tile registers: four panels at once.

Such rows wait for memory, which gives more where more panels are read (`int8_wide_product`). Sums
of two pairs of panels are in four registers; three are left for weights, in turn:

    registers        5 │ 6 │ 7     weights of panel 0, 1, 2, 3 (5 again)
    rows 4   x ────▶ 0   1   2   3 sums

What is added to a sum, and in which order, is as in `bf16_amx`: a row's bits are the same. Decode
steps beside those by two panels, none of them asked for ahead, medians of 4 or 5 processes a side
in turns, two threads of a shared Xeon:

    rows                     1       8       16
    Llama 3.2 1B's shape     0.86    0.85    0.89
    the embedded model       0.90    0.89    0.96
"""

from __future__ import annotations

from typing import Any, Final

from numba import types

from kernels.cpu.amx_tiles import (
    clear_tile,
    configure,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
)
from kernels.cpu.compiled import inlined
from kernels.cpu.emitted import emitted
from kernels.cpu.float_packing import AMX_DEPTH, PANEL_COLUMNS
from kernels.cpu.float_sizes import BLOCK_PANELS, ROW_BYTES, TILE_BYTES, TILE_ROWS
from kernels.cpu.gated_sums import write_gated_block
from kernels.cpu.matrix_product import sums_writer
from kernels.cpu.vector_ir import SECOND_LEVEL, Builder, Value, counted_loop, i64, offset, prefetch

PAIRS: Final = 2
PAIR_SUMS_BYTES: Final = TILE_ROWS * BLOCK_PANELS * ROW_BYTES
"""Of the sums of a pair: rows of 32 float32."""
SUMS: Final = 0
ROWS: Final = PAIRS * BLOCK_PANELS
WEIGHTS: Final = ROWS + 1
WEIGHTS_REGISTERS: Final = 3
TILES_AHEAD: Final = 1
"""Weights are asked for so many k tiles before they are wanted."""


@emitted(types.void, types.int64)
def configure_few_rows(builder: Builder, rows: Value) -> None:
    """Set up the tile registers of this thread for blocks of `rows` rows, 1 to 16."""
    counts: dict[int, tuple[Value | int, int]] = dict.fromkeys(range(WEIGHTS), (rows, ROW_BYTES))
    for number in range(WEIGHTS_REGISTERS):
        counts[WEIGHTS + number] = (TILE_ROWS, ROW_BYTES)
    configure(builder, counts)


@emitted(types.void, *[types.int64] * 8)
def two_pairs(
    builder: Builder, x: Value, row_stride: Value, depth: Value, tail: Value, weights: Value,
    second: Value, next_pair: Value, sums: Value,
) -> None:  # fmt: skip
    """Multiply a block of 1 to 16 rows with two pairs of panels.

    x: address of the rows, bfloat16, row_stride bytes apart. depth: k tiles. tail: address of the
    rows' k's behind them, 32 a row, filled up with zeros; or 0. weights: address of the first
    panel; second: bytes from a pair's first panel to its second, next_pair: from pair to pair.
    sums: a pair's float32 [16, 32], then the other's.
    """
    panels = [
        offset(builder, weights, *[next_pair] * pair, *[second] * panel)
        for pair in range(PAIRS)
        for panel in range(BLOCK_PANELS)
    ]
    for number in range(len(panels)):
        clear_tile(builder, SUMS + number)

    def multiply(rows: Value, stride: Value | int, index: Value, *, fetches: bool) -> None:
        load_tile(builder, ROWS, rows, stride)
        down = builder.mul(index, i64(TILE_BYTES))
        for number, panel in enumerate(panels):
            register = WEIGHTS + number % WEIGHTS_REGISTERS
            at = offset(builder, panel, down)
            load_tile(builder, register, at, ROW_BYTES)
            for line in range(TILE_ROWS if fetches else 0):
                ahead = TILES_AHEAD * TILE_BYTES + line * ROW_BYTES
                prefetch(builder, offset(builder, at, ahead), SECOND_LEVEL)
            multiply_tiles(builder, "tdpbf16ps", SUMS + number, ROWS, register)

    def body(index: Value) -> None:
        rows = offset(builder, x, builder.mul(index, i64(ROW_BYTES)))
        multiply(rows, row_stride, index, fetches=True)

    counted_loop(builder, depth, body)
    with builder.if_then(builder.icmp_signed("!=", tail, i64(0)), likely=False):
        multiply(tail, ROW_BYTES, depth, fetches=False)
    for number in range(len(panels)):
        pair, panel = divmod(number, BLOCK_PANELS)
        at = offset(builder, sums, pair * PAIR_SUMS_BYTES + panel * ROW_BYTES)
        store_tile(builder, SUMS + number, at, BLOCK_PANELS * ROW_BYTES)


@inlined()
def no_few_rows(
    x: int, rows: int, k: int, tail: int, weights: int, second: int, next_pair: int, first: int,
    end: int, n: int, out: int, stride: int, accumulate: int, sums: int,
) -> int:  # fmt: skip
    """Multiply nothing: quantised weights are unpacked for more rows."""
    return first


def few_rows_product(*, is_gated: bool) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what multiplies up to 16 rows with pairs of panels, two at a time.

    int64(x, rows, k, tail, weights, second, next_pair, first, end, n, out, stride, accumulate,
    sums): the first of pairs `first` to below `end` that is left. x, tail, second, next_pair: as
    `two_pairs` has them. weights, out: of pair 0. stride: bytes from row to row of `out`. sums:
    scratch memory for two pairs'. `is_gated`: pairs are gate and up.
    """
    write_block = sums_writer(BLOCK_PANELS)
    width = BLOCK_PANELS * PANEL_COLUMNS
    out_bytes = 2 * PANEL_COLUMNS if is_gated else 4 * width

    @inlined()
    def multiply(
        x: int, rows: int, k: int, tail: int, weights: int, second: int, next_pair: int, first: int,
        end: int, n: int, out: int, stride: int, accumulate: int, sums: int,
    ) -> int:  # fmt: skip
        if first + PAIRS > end:
            return first
        configure_few_rows(rows)
        while first + PAIRS <= end:
            at = weights + first * next_pair
            two_pairs(x, 2 * k, k // AMX_DEPTH, tail, at, second, next_pair, sums)
            for pair in range(PAIRS):
                of_pair, target = sums + pair * PAIR_SUMS_BYTES, out + first * out_bytes
                if is_gated:
                    write_gated_block(of_pair, rows, target, stride)
                else:
                    columns = min(width, n - first * width)
                    write_block(of_pair, rows, columns, target, stride // 4, accumulate)
                first += 1
        release_tiles()
        return first

    return multiply
