"""The loop around the AMX tiles: a run of pairs of panels times all rows of a step, in bfloat16.

    for groups of pairs that the second-level cache holds      (quantised: unpacked here, once)
        for blocks of 32 rows
            for runs of k tiles, short enough that the block's rows stay in the first level
                for the pairs of the group

Scratch memory of a worker:

    │ sums of a block │ unfinished sums, a block for each pair │ ends of rows │ unpacked pairs │
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import carray

from kernels.cpu.amx_tiles import release_tiles
from kernels.cpu.bf16_amx import configure_tiles, one_row_tile, two_row_tiles
from kernels.cpu.bf16_unpacking import bf16_unpacker
from kernels.cpu.compiled import inlined, scratch, uint16_at, word
from kernels.cpu.float_packing import AMX_DEPTH, PANEL_COLUMNS
from kernels.cpu.float_sizes import (
    BLOCK_BYTES,
    BLOCK_PANELS,
    BLOCK_ROWS,
    GROUP_BYTES,
    GROUP_PAIRS,
    TAIL_BYTES,
    TILE_BYTES,
    TILE_ROWS,
)
from kernels.cpu.gated_sums import write_gated_block
from kernels.cpu.int8_packing import Int8Format
from kernels.cpu.int8_weights import panel_sizer
from kernels.cpu.matrix_product import sums_writer
from kernels.cpu.operands import Product

STOP: Final = 10
"""k tiles after which a block of many rows turns to the next pair: its rows, 64 bytes each of a k
tile, stay in the first-level cache until all pairs have passed."""
MANY_ROWS: Final = 2 * BLOCK_ROWS
"""Rows from which that pays: fewer wait for the weights anyway."""
SAME_PLACE_BYTES: Final = 4096
"""Rows so far apart, or a multiple of it, fall into the same few lines of the first-level cache:
they do not stay there in any case."""


@inlined()
def copy_tails(x: int, rows: int, k: int, tails: int) -> None:
    """Copy what lies behind the whole k tiles of each row, and zeros behind it."""
    whole = k // AMX_DEPTH * AMX_DEPTH
    for r in range(rows):
        source = carray(uint16_at(x + 2 * (r * k + whole)), k - whole)
        target = carray(uint16_at(tails + TAIL_BYTES * r), AMX_DEPTH)
        target[:] = 0
        for i in range(k - whole):
            target[i] = source[i]


@inlined()
def _unpack_nothing(panel: int, groups: int, tiles: int) -> None:
    """Do nothing: BF16 panels are what the tile registers read."""


@inlined()
def _bf16_panel_bytes(tiles: int) -> int:
    return tiles * TILE_BYTES


def amx_product(fmt: Int8Format | None = None, *, is_gated: bool = False) -> Callable[..., None]:
    """Return the kernel of rows of bfloat16 with BF16 weights, or with quantised ones.

    `is_gated`: the N columns are gate and then as many of up; OUT is bfloat16 [M, N / 2] of
    silu(gate) · up, which `Product.ACCUMULATE` cannot add to. N / 2 is a multiple of 16.
    """
    is_quantised = fmt is not None
    element_bytes = 2 if is_gated else 4
    pair_columns = PANEL_COLUMNS if is_gated else BLOCK_PANELS * PANEL_COLUMNS
    # From a pair to the next one: panels of the model's matrix, and of what is multiplied.
    stored_step = 1 if is_gated else BLOCK_PANELS
    step = BLOCK_PANELS if is_quantised else stored_step
    stored_size = _bf16_panel_bytes if fmt is None else panel_sizer(fmt)
    unpack = _unpack_nothing if fmt is None else bf16_unpacker(fmt)
    write_block = sums_writer(BLOCK_PANELS)

    def multiply(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
        x, stored = word(record, Product.INPUT), word(record, Product.WEIGHTS)
        k, n = word(record, Product.K), word(record, Product.N)
        stride, accumulate = word(record, Product.OUT_STRIDE), word(record, Product.ACCUMULATE)
        num_rows = word(header, word(record, Product.ROWS_WORD))
        first_row = word(header, word(record, Product.OUT_FIRST_WORD))
        out = word(record, Product.OUT) + element_bytes * first_row * stride

        width = BLOCK_PANELS * PANEL_COLUMNS
        depth = k // AMX_DEPTH
        num_tiles = (k + AMX_DEPTH - 1) // AMX_DEPTH
        panel, stored_panel = num_tiles * TILE_BYTES, stored_size(num_tiles)
        num_pairs = (n + width - 1) // width
        # A pair is two neighbours, or a panel of gate and the one of up so far behind it.
        stored_apart = n // width if is_gated else 1
        apart = 1 if is_quantised else stored_apart
        first, end = num_pairs * chunk // num_chunks, num_pairs * (chunk + 1) // num_chunks
        group = max(1, min(GROUP_PAIRS, GROUP_BYTES // (BLOCK_PANELS * panel)))
        num_runs = 1
        if num_rows >= MANY_ROWS and 2 * k % SAME_PLACE_BYTES != 0:
            num_runs = max(1, (depth + STOP - 1) // STOP)
        finished = scratch(header, worker)
        unfinished = finished + BLOCK_BYTES
        tails = unfinished + GROUP_PAIRS * BLOCK_BYTES
        unpacked = tails + BLOCK_ROWS * TAIL_BYTES

        configured = 0
        for start in range(first, end, group):
            group_end = min(start + group, end)
            weights = stored + start * stored_step * stored_panel
            if is_quantised:
                columns = min(n, group_end * width) - start * width
                for p in range((columns + PANEL_COLUMNS - 1) // PANEL_COLUMNS):
                    taken = p // BLOCK_PANELS * stored_step + p % BLOCK_PANELS * stored_apart
                    unpack(weights + taken * stored_panel, depth, unpacked + p * panel)
                weights = unpacked
            for r in range(0, num_rows, BLOCK_ROWS):
                rows = min(BLOCK_ROWS, num_rows - r)
                if rows != configured:
                    configure_tiles(rows)
                    configured = rows
                if k % AMX_DEPTH != 0:
                    copy_tails(x + 2 * r * k, rows, k, tails)
                for run in range(num_runs):
                    first_tile, end_tile = depth * run // num_runs, depth * (run + 1) // num_runs
                    is_last = run == num_runs - 1
                    x_at = x + 2 * (r * k + first_tile * AMX_DEPTH)
                    tail = tails if is_last and k % AMX_DEPTH != 0 else 0
                    for pair in range(start, group_end):
                        column = pair * width
                        columns = min(width, n - column)
                        at = weights + (pair - start) * step * panel + first_tile * TILE_BYTES
                        second = apart * panel if columns > PANEL_COLUMNS else 0
                        target = out + element_bytes * (r * stride + pair * pair_columns)
                        so_far = unfinished + (pair - start) * BLOCK_BYTES
                        before = so_far if run > 0 else 0
                        is_whole = columns == width and accumulate == 0
                        is_direct = is_last and is_whole and not is_gated
                        sums, sums_stride = so_far, 4 * width
                        if is_direct:
                            sums, sums_stride = target, 4 * stride
                        elif is_last:
                            sums = finished
                        tiles = end_tile - first_tile
                        if rows > TILE_ROWS:
                            two_row_tiles(
                                x_at, 2 * k, tiles, tail, at, second, before, sums, sums_stride
                            )
                        else:
                            one_row_tile(
                                x_at, 2 * k, tiles, tail, at, second, before, sums, sums_stride
                            )
                        if is_last and is_gated:
                            write_gated_block(sums, rows, target, element_bytes * stride)
                        elif is_last and not is_direct:
                            write_block(sums, rows, columns, target, stride, accumulate)
        if configured:
            release_tiles()

    return multiply
