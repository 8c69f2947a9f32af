"""The loop around the AMX tiles: a run of pairs of panels times all rows of a step, in bfloat16.

    for groups of pairs
        for spans of 512 rows
            for parts of some 64 k tiles, whose weights the second-level cache holds for the group
                (quantised: unpacked here, once for the span)
                for blocks of 32 rows
                    for the pairs of the group

Scratch memory of a worker:

    │ sums of a block │ unfinished sums of a span and a group │ ends of rows │ unpacked part │

Up to 16 rows with BF16 weights go through two pairs at once (`bf16_amx_few_rows`), as far as there
are two.

What was tried (one thread of a Sapphire Rapids or later server, 512 rows, 2048 outputs, in turns):
without parts, K 8192 takes 1.6 times as long, since each pair of panels reads all rows from memory;
parts of 16 or 32 k tiles 1.1 to 1.25 times, since sums go out and come back. Shorter runs of k
tiles, so that the block's rows stay in the first-level cache: 1.1 to 1.2. Rows copied into
contiguous tiles: 1.1 to 1.25. Rows, sums or weights asked for ahead: 1.0 to 1.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import carray

from kernels.cpu.amx_tiles import release_tiles
from kernels.cpu.bf16_amx import configure_tiles, one_row_tile, two_row_tiles
from kernels.cpu.bf16_amx_few_rows import few_rows_product, no_few_rows
from kernels.cpu.bf16_unpacking import bf16_unpacker
from kernels.cpu.compiled import inlined, scratch, uint16_at, word
from kernels.cpu.float_packing import AMX_DEPTH, PANEL_COLUMNS
from kernels.cpu.float_sizes import (
    BLOCK_BYTES,
    BLOCK_PANELS,
    BLOCK_ROWS,
    GROUP_BYTES,
    GROUP_PAIRS,
    PART_TILES,
    TAIL_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    TOGETHER_ROWS,
    UNFINISHED_BYTES,
)
from kernels.cpu.gated_sums import write_gated_block
from kernels.cpu.int8_packing import Int8Format
from kernels.cpu.int8_weights import panel_sizer
from kernels.cpu.matrix_product import sums_writer
from kernels.cpu.operands import Product

SAME_PLACE_BYTES: Final = 128 << 10
"""Panels so far apart, or a multiple of it, meet in the same lines of the second-level cache."""


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
def _unpack_nothing(panel: int, groups: int, first: int, count: int, tiles: int) -> None:
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
    # From a pair to the next one: panels of the model's matrix.
    stored_step = 1 if is_gated else BLOCK_PANELS
    stored_size = _bf16_panel_bytes if fmt is None else panel_sizer(fmt)
    unpack = _unpack_nothing if fmt is None else bf16_unpacker(fmt)
    write_block = sums_writer(BLOCK_PANELS)
    by_two_pairs = no_few_rows if is_quantised else few_rows_product(is_gated=is_gated)
    most_few = 0 if is_quantised else TILE_ROWS

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
        stored_panel = stored_size(num_tiles)
        num_pairs = (n + width - 1) // width
        # A pair is two neighbours, or a panel of gate and the one of up so far behind it.
        stored_apart = n // width if is_gated else 1
        whole_pairs = (n + PANEL_COLUMNS - 1) // PANEL_COLUMNS // BLOCK_PANELS
        first, end = num_pairs * chunk // num_chunks, num_pairs * (chunk + 1) // num_chunks
        num_parts = max(1, (depth + PART_TILES // 2) // PART_TILES)
        longest = (depth + num_parts - 1) // num_parts
        group = GROUP_PAIRS
        if longest > 0:
            group = min(group, GROUP_BYTES // (BLOCK_PANELS * TILE_BYTES * longest))
        if not is_quantised and num_parts > 1 and stored_panel % SAME_PLACE_BYTES == 0:
            group = GROUP_PAIRS // 2
        finished = scratch(header, worker)
        unfinished = finished + BLOCK_BYTES
        tails = unfinished + UNFINISHED_BYTES
        unpacked = tails + BLOCK_ROWS * TAIL_BYTES

        if 0 < num_rows <= most_few:
            tail = 0
            if k % AMX_DEPTH != 0:
                copy_tails(x, num_rows, k, tails)
                tail = tails
            first = by_two_pairs(
                x, num_rows, k, tail, stored, stored_apart * stored_panel,
                stored_step * stored_panel, first, min(end, whole_pairs), n,
                out, element_bytes * stride, accumulate, finished,
            )  # fmt: skip
        configured = 0
        for start in range(first, end, group):
            group_end = min(start + group, end)
            num_panels = (
                min(n, group_end * width) - start * width + PANEL_COLUMNS - 1
            ) // PANEL_COLUMNS
            for top in range(0, num_rows, TOGETHER_ROWS):
                bottom = min(top + TOGETHER_ROWS, num_rows)
                for part in range(num_parts):
                    from_tile = depth * part // num_parts
                    tiles = depth * (part + 1) // num_parts - from_tile
                    is_last = part == num_parts - 1
                    weights = stored + start * stored_step * stored_panel + from_tile * TILE_BYTES
                    panel, step, apart = stored_panel, stored_step, stored_apart
                    if is_quantised:
                        panel, step, apart = tiles * TILE_BYTES, BLOCK_PANELS, 1
                        for p in range(num_panels):
                            taken = (start + p // BLOCK_PANELS) * stored_step
                            taken += p % BLOCK_PANELS * stored_apart
                            target = unpacked + p * panel
                            unpack(stored + taken * stored_panel, depth, from_tile, tiles, target)
                        weights = unpacked
                    for r in range(top, bottom, BLOCK_ROWS):
                        rows = min(BLOCK_ROWS, bottom - r)
                        if rows != configured:
                            configure_tiles(rows)
                            configured = rows
                        tail = 0
                        if is_last and k % AMX_DEPTH != 0:
                            copy_tails(x + 2 * r * k, rows, k, tails)
                            tail = tails
                        x_at = x + 2 * (r * k + from_tile * AMX_DEPTH)
                        so_far = unfinished + (r - top) // BLOCK_ROWS * GROUP_PAIRS * BLOCK_BYTES
                        for pair in range(start, group_end):
                            columns = min(width, n - pair * width)
                            at = weights + (pair - start) * step * panel
                            second = apart * panel if columns > PANEL_COLUMNS else 0
                            target = out + element_bytes * (r * stride + pair * pair_columns)
                            before = so_far if part > 0 else 0
                            is_direct = (
                                is_last and accumulate == 0 and columns == width and not is_gated
                            )
                            sums, sums_stride = so_far, 4 * width
                            if is_direct:
                                sums, sums_stride = target, 4 * stride
                            elif is_last:
                                sums = finished
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
                            so_far += BLOCK_BYTES
        if configured:
            release_tiles()

    return multiply
