"""Matrix products with floating-point weights, as operations.

    product_f32, product_f16, product_bf16    rows of float32
    product_bf16_rows                         rows of bfloat16, weights of bfloat16

Operands: `kernels.cpu.matrix_product.Product`. Weights: `kernels.cpu.float_packing`. A chunk is a
run of groups of panels: a weight is read from memory by one thread, once, and all rows of the step
meet it while it is in that thread's cache.

A sum is computed whole, and only then written to OUT or added to what is there.
"""

from __future__ import annotations

from typing import Any, Final

from numba import carray, types

from kernels.cpu.bf16_amx import (
    BLOCK_BYTES,
    BLOCK_PANELS,
    BLOCK_ROWS,
    TILE_BYTES,
    TILE_ROWS,
    configure_tiles,
    one_row_tile,
    release_tiles,
    two_row_tiles,
)
from kernels.cpu.emitted import emitted
from kernels.cpu.float_packing import AMX_DEPTH, PANEL_COLUMNS
from kernels.cpu.float_tile import ROW_BYTES, float_tiles, tile_sizes
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.matrix_product import Product, sums_writer
from kernels.cpu.operation import inlined, operation, scratch, uint16_at, word

SET: Final = selected_instruction_set()
SIZES: Final = tile_sizes(SET)
GROUP_PANELS: Final = SIZES.panels
MOST_ROWS: Final = SIZES.rows[0]
FEW_ROWS: Final = SIZES.rows[1]

AMX_GROUP_PAIRS: Final = 16
AMX_GROUP_BYTES: Final = 512 << 10
"""Pairs of panels, and their bytes, that one block of rows meets before the next block comes: they
stay in the second-level cache."""
AMX_STOP: Final = 10
"""k tiles after which a block of many rows turns to the next pair: its rows, 64 bytes each of a k
tile, stay in the first-level cache until all pairs have passed."""
AMX_MANY_ROWS: Final = 2 * BLOCK_ROWS
"""Rows from which that pays: fewer wait for the weights anyway."""
SAME_PLACE_BYTES: Final = 4096
"""Rows so far apart, or a multiple of it, fall into the same few lines of the first-level cache:
they do not stay there in any case."""

TAIL_BYTES: Final = 2 * AMX_DEPTH
SCRATCH_BYTES: Final = (AMX_GROUP_PAIRS + 1) * BLOCK_BYTES + BLOCK_ROWS * TAIL_BYTES
"""Scratch memory a worker needs for these operations: sums so far, and the ends of rows."""


def _product(weights: str, row: str, element_bytes: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the kernel for a format of weights and of rows, made of vector tiles."""
    tiles = emitted(types.void, *[types.int64] * 8)(float_tiles(weights, row, SIZES, SET))
    write_sums = sums_writer(GROUP_PANELS)
    row_bytes = ROW_BYTES[row]
    panel_depth = AMX_DEPTH if weights == "BF16" else 1

    @inlined()
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
        first_group = num_groups * chunk // num_chunks
        for group in range(first_group, num_groups * (chunk + 1) // num_chunks):
            column = group * width
            columns = min(width, n - column)
            last_panel = (columns - 1) // PANEL_COLUMNS
            at = weights_at + group * GROUP_PANELS * panel
            r = 0
            while r < num_rows:
                left = num_rows - r
                rows = 1
                if left >= MOST_ROWS:
                    rows = MOST_ROWS
                elif left >= FEW_ROWS:
                    rows = FEW_ROWS
                tiles(rows, x + r * k * row_bytes, k * row_bytes, k, at, panel, last_panel, sums)
                target = out + 4 * (r * stride + column)
                write_sums(sums, rows, columns, target, stride, accumulate)
                r += rows

    return multiply


_f32 = _product("F32", "F32", 4)
_f16 = _product("F16", "F32", 2)
_bf16 = _product("BF16", "F32", 2)
_bf16_rows_in_vectors = _product("BF16", "BF16", 2)
_write_block = sums_writer(BLOCK_PANELS)


@inlined()
def _copy_tails(x: int, rows: int, k: int, tails: int) -> None:
    """Copy what lies behind the whole k tiles of each row, and zeros behind it."""
    whole = k // AMX_DEPTH * AMX_DEPTH
    for r in range(rows):
        source = carray(uint16_at(x + 2 * (r * k + whole)), k - whole)
        target = carray(uint16_at(tails + TAIL_BYTES * r), AMX_DEPTH)
        target[:] = 0
        for i in range(k - whole):
            target[i] = source[i]


@inlined()
def _bf16_rows_in_tiles(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply rows and weights of bfloat16 in the tile registers (`kernels.cpu.bf16_amx`).

    For groups of pairs of panels: for blocks of 32 rows: for runs of k tiles: for the pairs.
    """
    x, weights = word(record, Product.INPUT), word(record, Product.WEIGHTS)
    k, n = word(record, Product.K), word(record, Product.N)
    stride, accumulate = word(record, Product.OUT_STRIDE), word(record, Product.ACCUMULATE)
    num_rows = word(header, word(record, Product.ROWS_WORD))
    first_row = word(header, word(record, Product.OUT_FIRST_WORD))
    out = word(record, Product.OUT) + 4 * first_row * stride

    width = BLOCK_PANELS * PANEL_COLUMNS
    depth = k // AMX_DEPTH
    panel = (k + AMX_DEPTH - 1) // AMX_DEPTH * TILE_BYTES
    num_pairs = (n + width - 1) // width
    first, end = num_pairs * chunk // num_chunks, num_pairs * (chunk + 1) // num_chunks
    group = max(1, min(AMX_GROUP_PAIRS, AMX_GROUP_BYTES // (BLOCK_PANELS * panel)))
    num_runs = 1
    if num_rows >= AMX_MANY_ROWS and 2 * k % SAME_PLACE_BYTES != 0:
        num_runs = max(1, (depth + AMX_STOP - 1) // AMX_STOP)
    finished = scratch(header, worker)
    unfinished = finished + BLOCK_BYTES
    tails = unfinished + AMX_GROUP_PAIRS * BLOCK_BYTES

    configured = 0
    for start in range(first, end, group):
        for r in range(0, num_rows, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, num_rows - r)
            if rows != configured:
                configure_tiles(rows)
                configured = rows
            if k % AMX_DEPTH != 0:
                _copy_tails(x + 2 * r * k, rows, k, tails)
            for run in range(num_runs):
                first_tile, end_tile = depth * run // num_runs, depth * (run + 1) // num_runs
                is_last = run == num_runs - 1
                x_at = x + 2 * (r * k + first_tile * AMX_DEPTH)
                tail = tails if is_last and k % AMX_DEPTH != 0 else 0
                for pair in range(start, min(start + group, end)):
                    column = pair * width
                    columns = min(width, n - column)
                    at = weights + pair * BLOCK_PANELS * panel + first_tile * TILE_BYTES
                    second = panel if columns > PANEL_COLUMNS else 0
                    target = out + 4 * (r * stride + column)
                    so_far = unfinished + (pair - start) * BLOCK_BYTES
                    before = so_far if run > 0 else 0
                    is_direct = is_last and columns == width and accumulate == 0
                    sums, sums_stride = so_far, 4 * width
                    if is_direct:
                        sums, sums_stride = target, 4 * stride
                    elif is_last:
                        sums = finished
                    num_tiles = end_tile - first_tile
                    if rows > TILE_ROWS:
                        two_row_tiles(
                            x_at, 2 * k, num_tiles, tail, at, second, before, sums, sums_stride
                        )
                    else:
                        one_row_tile(
                            x_at, 2 * k, num_tiles, tail, at, second, before, sums, sums_stride
                        )
                    if is_last and not is_direct:
                        _write_block(sums, rows, columns, target, stride, accumulate)
    if configured:
        release_tiles()


_bf16_rows = _bf16_rows_in_tiles if SET.has_amx else _bf16_rows_in_vectors


@operation()
def product_f32(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply float32 rows with F32 weights."""
    _f32(record, header, chunk, num_chunks, worker)


@operation()
def product_f16(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply float32 rows with F16 weights."""
    _f16(record, header, chunk, num_chunks, worker)


@operation()
def product_bf16(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply float32 rows with BF16 weights."""
    _bf16(record, header, chunk, num_chunks, worker)


@operation()
def product_bf16_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply bfloat16 rows with BF16 weights."""
    _bf16_rows(record, header, chunk, num_chunks, worker)
