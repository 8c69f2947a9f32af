"""Matrix products of int8 rows with quantised weights, as operations.

    product_q4_1, product_q4_0, product_q8_0, product_q5_1, …: a product for each format

Operands: `kernels.cpu.matrix_product`. Weights: `kernels.cpu.int8_packing`. A chunk is a
run of groups of panels: a weight is read from memory by one thread, once, and all rows of the step
meet it while it is in that thread's cache.

A sum is computed whole, and only then written to OUT or added to what is there.

Rows that are more than a tile of vectors holds go through a group of panels in several passes. The
first waits for memory and the others for the multipliers, so all of them share in fetching the
panels behind: milliseconds of N = 16384, K = 2048 from memory before that / with it (two threads of
a shared Xeon with AMX, medians of 9; 10 rows and more went by tiles of 16 before):

    rows               6          8          10         12         17         24
    Q4_0, amx          4.6 / 4.7  6.6 / 5.1  9.3 / 5.8  9.2 / 6.4  17.5 / 8.6 16.7 / 11.7
    Q4_0, avx512       4.0 / 4.2  6.1 / 4.8             7.4 / 5.9
    Q4_0, avx2         8.6 / 7.4  10.8 / 9.8            15.9 / 14.8

Measured on one thread of an Intel processor with AMX (3.4 GHz, other processes beside it) that
reads 16 GB/s and does 0.85–0.93 · 10^12 operations a second with VPDPBUSD alone. N = 3072, K = 576
and N = 576, K = 1536, weights larger than the caches up to 32 rows:

    rows     1          2            6            (12)     16            32       64
    Q4_1     14 GB/s    13–14 GB/s   13 GB/s      0.30 T   0.37–0.43 T   0.58 T   0.56–0.6 T
    Q4_0     14 GB/s    13 GB/s      12 GB/s      0.31 T   0.35–0.43 T   …        0.64–0.65 T
    Q8_0     15 GB/s    15 GB/s      13.5 GB/s    0.23 T   0.33 T        0.51 T   0.53 T
    by       vectors    …            …            tiles    …             …        …

Q4_0 was measured before panels went by in runs.

The same on an AMD EPYC (Zen 4, 3.6 GHz), which does 0.46 · 10^12 with VPDPBUSD alone and has no
AMX: 0.30–0.31 T from 6 rows on by vectors, which is what their multiplications allow (8 of 11 are
dot products); 0.37 T of 4-bit weights with 512 rows by pairs (`int8_pair_tile`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types

from kernels.cpu.catalogue import INT8_PRODUCTS
from kernels.cpu.compiled import define, inlined, scratch, word
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_amx_product import amx_product
from kernels.cpu.int8_packing import GROUP, INT8_FORMATS, PANEL_COLUMNS, Int8Format
from kernels.cpu.int8_pair_product import PAIR_ROWS, PAIRED_BITS, pair_product
from kernels.cpu.int8_sizes import (
    BLOCK_ROWS,
    GROUP_PANELS,
    HAS_AMX,
    MOST_ROWS,
    MOST_ROWS_OF_PARTS,
    PAIRS_PRODUCTS,
    SIZES,
    SUMS_OF_TILE_BYTES,
    WIDTH,
)
from kernels.cpu.int8_tile import begins_word, int8_tiles
from kernels.cpu.int8_unpacking import unpacked_from, unpacker
from kernels.cpu.int8_weights import panel_sizer
from kernels.cpu.int8_wide_product import wide_product
from kernels.cpu.matrix_product import SHARE_BITS, num_tiles, sums_writer, tile_rows
from kernels.cpu.operands import Product

SET: Final = selected_instruction_set()

AMX_ROWS: Final = 13
"""Of a block of 16: from so many on the tile registers, which compute all 16, beat vectors.

Time of vectors / of tiles with 10, 12, 14, 16 rows (N = 16384, K = 2048, two threads of a shared
Xeon): Q4_0 0.8, 0.9, 1.0, 1.1, Q8_0 0.9, 1.0, 1.1, 1.2; with 24 and 32: 0.9 and 1.3, 1.0 and 1.5.
"""


@inlined()
def fills_blocks(rows: int) -> bool:
    """Tell whether the blocks of 16 rows that hold these have AMX_ROWS each, on average."""
    return rows >= AMX_ROWS * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)


def _product(fmt: Int8Format) -> Callable[..., None]:
    """Return the kernel of a format, made of vector tiles."""
    tiles = emitted(types.void, *[types.int64] * 11)(int8_tiles(fmt, SIZES, SET))
    tiles_of_unpacked = emitted(types.void, *[types.int64] * 12)(
        int8_tiles(fmt, SIZES, SET, is_unpacked=True)
    )
    unpack, unpacked_rows = unpacker(fmt, GROUP_PANELS, SET), unpacked_from(fmt, SET)
    is_unpacked = unpacked_rows > 0
    panel_bytes = panel_sizer(fmt)
    by_wide_tiles = wide_product(fmt)
    by_tiles = amx_product(fmt)
    by_pairs = pair_product(fmt)
    in_tiles = HAS_AMX and fmt.parts == 1
    in_pairs = PAIRS_PRODUCTS and fmt.bits == PAIRED_BITS
    write_sums = sums_writer(GROUP_PANELS)
    begins_at = begins_word(fmt)
    most_rows = MOST_ROWS if fmt.parts == 1 else MOST_ROWS_OF_PARTS

    def multiply(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
        x, scales = word(record, Product.INPUT), word(record, Product.INPUT_SCALES)
        scaled_sums = word(record, Product.INPUT_SCALED_SUMS)
        row_sums, begins = word(record, Product.INPUT_SUMS), word(record, begins_at)
        pair_sums = word(record, Product.INPUT_PAIR_SUMS)
        weights = word(record, Product.WEIGHTS)
        k, n = word(record, Product.K), word(record, Product.N)
        stride, accumulate = word(record, Product.OUT_STRIDE), word(record, Product.ACCUMULATE)
        num_rows = word(header, word(record, Product.ROWS_WORD))
        first_row = word(header, word(record, Product.OUT_FIRST_WORD))
        out = word(record, Product.OUT) + 4 * first_row * stride
        groups = k // GROUP
        panel = panel_bytes(groups)
        sums = scratch(header, worker)
        unpacked = sums + SUMS_OF_TILE_BYTES
        if in_tiles and fills_blocks(num_rows):
            panels = (n + PANEL_COLUMNS - 1) // PANEL_COLUMNS
            first, end = panels * chunk // num_chunks, panels * (chunk + 1) // num_chunks
            by_tiles(
                x, scales, scaled_sums, num_rows, groups, weights, first, end, n, out, stride,
                accumulate, sums, worker,
            )  # fmt: skip
            return
        if in_pairs and num_rows >= PAIR_ROWS:
            panels = (n + PANEL_COLUMNS - 1) // PANEL_COLUMNS
            first, end = panels * chunk // num_chunks, panels * (chunk + 1) // num_chunks
            by_pairs(
                x, scales, scaled_sums, row_sums, pair_sums, num_rows, groups, weights, panel,
                first, end, n, out, stride, accumulate, sums,
            )  # fmt: skip
            return
        num_groups = (n + WIDTH - 1) // WIDTH
        group, end = num_groups * chunk // num_chunks, num_groups * (chunk + 1) // num_chunks
        panels = min(end * GROUP_PANELS, (n + PANEL_COLUMNS - 1) // PANEL_COLUMNS)
        left = by_wide_tiles(
            num_rows, x, scales, scaled_sums, begins, groups, weights, panel, group * GROUP_PANELS,
            panels, n, out, stride, accumulate, sums,
        )  # fmt: skip
        for group in range(left // GROUP_PANELS, end):
            column = group * WIDTH
            columns = min(WIDTH, n - column)
            at = weights + group * GROUP_PANELS * panel
            second = panel if columns > PANEL_COLUMNS else 0
            if is_unpacked and num_rows >= unpacked_rows:
                unpack(at, second, groups, unpacked)
            fetch_step = (1 << SHARE_BITS) // num_tiles(num_rows, most_rows)
            fetch_first = r = 0
            while r < num_rows:
                rows = tile_rows(num_rows - r, most_rows)
                down = 4 * r * groups
                if is_unpacked and num_rows >= unpacked_rows:
                    tiles_of_unpacked(
                        rows, x + r * k, scales + down, scaled_sums + down, begins + down,
                        groups, at, second, sums, fetch_first, fetch_step, unpacked,
                    )  # fmt: skip
                else:
                    tiles(
                        rows, x + r * k, scales + down, scaled_sums + down, begins + down,
                        groups, at, second, sums, fetch_first, fetch_step,
                    )  # fmt: skip
                target = out + 4 * (r * stride + column)
                write_sums(sums, rows, columns, target, stride, accumulate)
                r += rows
                fetch_first += groups * fetch_step

    return multiply


for _label, _fmt in INT8_FORMATS.items():
    define(INT8_PRODUCTS[_label], _product(_fmt))
