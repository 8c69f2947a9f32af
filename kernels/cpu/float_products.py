"""Matrix products with floating-point weights, as operations.

    product_f32, product_f16, product_bf16    rows of float32
    product_bf16_rows                         rows of bfloat16, weights of bfloat16
    product_q4_1_unpacked, …                  rows of bfloat16, quantised weights (AMX only)
    gated_product_bf16, …_q4_1, …             the same two, columns gate | up: silu(gate) · up comes
                                              out, as rows of bfloat16 (AMX only)

Operands: `kernels.cpu.matrix_product`. Weights: `kernels.cpu.float_packing`. A chunk is a
run of groups of panels: a weight is read from memory by one thread, once, and all rows of the step
meet it while it is in that thread's cache.

A sum is computed whole, and only then written to OUT or added to what is there.

Few rows go through more panels at once than others (`float_sizes.wide_tile_sizes`): BF16 weights of
Llama 3.2 1B's shape, decode steps beside those without, medians of 4 processes a side in turns, two
threads of a shared Xeon with AMX:

    rows                1       2       4
    avx512              0.97    0.91    0.91
    avx2                0.78

Tiles of AMX: `bf16_amx_few_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types

from kernels.cpu.bf16_amx_product import amx_product
from kernels.cpu.catalogue import (
    FLOAT_PRODUCTS,
    GATED_PRODUCTS,
    UNPACKED_PRODUCTS,
    product_bf16_rows,
)
from kernels.cpu.compiled import define, scratch, word
from kernels.cpu.emitted import emitted
from kernels.cpu.float_packing import AMX_DEPTH, PANEL_COLUMNS
from kernels.cpu.float_sizes import (
    GROUP_PANELS,
    MOST_ROWS,
    SIZES,
    WIDE_SIZES,
)
from kernels.cpu.float_tile import ROW_BYTES, float_tiles
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import INT8_FORMATS
from kernels.cpu.matrix_product import sums_writer, tile_rows
from kernels.cpu.operands import Product
from kernels.cpu.vector_ir import Builder, Value

SET: Final = selected_instruction_set()

LINES_AHEAD: Final = 16
"""Other distances were not measured."""


def _no_tiles(builder: Builder, *operands: Value) -> None:
    """Emit nothing: few rows go as others do."""


def _product(weights: str, row: str, element_bytes: int) -> Callable[..., None]:
    """Return the kernel for a format of weights and of rows, made of vector tiles."""
    tiles = emitted(types.void, *[types.int64] * 8)(float_tiles(weights, row, SIZES, SET))
    write_sums = sums_writer(GROUP_PANELS)
    wide = WIDE_SIZES or SIZES
    most_few = wide.rows if WIDE_SIZES else 0
    wide_groups = wide.panels // GROUP_PANELS
    emitter = float_tiles(weights, row, wide, SET, lines_ahead=LINES_AHEAD)
    wide_tiles = emitted(types.void, *[types.int64] * 8)(emitter if WIDE_SIZES else _no_tiles)
    write_wide_sums = sums_writer(wide.panels)
    row_bytes = ROW_BYTES[row]
    panel_depth = AMX_DEPTH if weights == "BF16" else 1

    def multiply(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
        x, weights_at = word(record, Product.INPUT), word(record, Product.WEIGHTS)
        k, n = word(record, Product.K), word(record, Product.N)
        stride, accumulate = word(record, Product.OUT_STRIDE), word(record, Product.ACCUMULATE)
        num_rows = word(header, word(record, Product.ROWS_WORD))
        first_row = word(header, word(record, Product.OUT_FIRST_WORD))
        out = word(record, Product.OUT) + 4 * first_row * stride
        panel = (k + panel_depth - 1) // panel_depth * panel_depth * PANEL_COLUMNS * element_bytes
        sums = scratch(header, worker)
        width = GROUP_PANELS * PANEL_COLUMNS
        num_groups = (n + width - 1) // width
        first, end = num_groups * chunk // num_chunks, num_groups * (chunk + 1) // num_chunks
        while 0 < num_rows <= most_few and first + wide_groups <= end:
            column = first * width
            columns = min(wide_groups * width, n - column)
            last_panel = (columns - 1) // PANEL_COLUMNS
            at = weights_at + first * GROUP_PANELS * panel
            wide_tiles(num_rows, x, k * row_bytes, k, at, panel, last_panel, sums)
            write_wide_sums(sums, num_rows, columns, out + 4 * column, stride, accumulate)
            first += wide_groups
        for group in range(first, end):
            column = group * width
            columns = min(width, n - column)
            last_panel = (columns - 1) // PANEL_COLUMNS
            at = weights_at + group * GROUP_PANELS * panel
            r = 0
            while r < num_rows:
                rows = tile_rows(num_rows - r, MOST_ROWS)
                tiles(rows, x + r * k * row_bytes, k * row_bytes, k, at, panel, last_panel, sums)
                target = out + 4 * (r * stride + column)
                write_sums(sums, rows, columns, target, stride, accumulate)
                r += rows

    return multiply


for _label, _element_bytes in (("F32", 4), ("F16", 2), ("BF16", 2)):
    define(FLOAT_PRODUCTS[_label], _product(_label, "F32", _element_bytes))
define(product_bf16_rows, amx_product() if SET.has_amx else _product("BF16", "BF16", 2))
for _label, _fmt in INT8_FORMATS.items():
    define(UNPACKED_PRODUCTS[_label], amx_product(_fmt))
    define(GATED_PRODUCTS[_label], amx_product(_fmt, is_gated=True))
define(GATED_PRODUCTS["BF16"], amx_product(is_gated=True))
