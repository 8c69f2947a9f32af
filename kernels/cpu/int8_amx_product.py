"""The loop around the AMX kernel: a run of panels times all rows of a step.

Scratch memory of a worker, G = K/32, B blocks of 16 rows:

    │ ring 4 KiB │ sums of a block 1 KiB │ last rows 16·K │ scales 64·G │ scaled sums 64·G │
    │ slots of a panel G · 704 │ minima B · 1 KiB │

The rows that are left after the last whole block of 16 are copied there, filled up with zeros, so
that nothing behind the last row is ever read.
"""

from __future__ import annotations

from typing import Any, Final

from numba import carray

from kernels.cpu import int8_amx as amx
from kernels.cpu.int8_amx import BLOCK_BYTES, BLOCK_ROWS, RING_BLOCKS, TILE_BYTES
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.operation import inlined, uint8_at

MOST_ROWS: Final = 512
"""Rows multiplied with a panel at a time; more rows come again."""


def amx_scratch_bytes(k: int) -> int:
    """Return the scratch memory a worker needs for a product with `k` inputs."""
    groups = k // GROUP
    last = BLOCK_ROWS * (k + 2 * 4 * groups)
    slots = groups * (TILE_BYTES + 3 * VECTOR_BYTES)
    return (RING_BLOCKS + 1) * BLOCK_BYTES + last + slots + MOST_ROWS // BLOCK_ROWS * BLOCK_BYTES


@inlined()
def copy_filled_up(source: int, size: int, target: int, whole_size: int) -> None:
    """Copy `size` bytes, and zeros behind them."""
    from_, to = carray(uint8_at(source), size), carray(uint8_at(target), whole_size)
    to[:size] = from_
    to[size:] = 0


def amx_product(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the function that multiplies a run of panels with up to MOST_ROWS rows."""
    unpack, make_minima = amx.unpacker(fmt), amx.minima_maker(fmt)
    multiply_panel = amx.panel_multiplier(fmt)
    tile_bytes, slot_bytes, has_minimum = fmt.tile_bytes, amx.slot_bytes(fmt), fmt.has_minimum

    @inlined()
    def multiply(
        x: int, scales: int, scaled_sums: int, num_rows: int, groups: int, weights: int,
        first_panel: int, end_panel: int, n: int, out: int, stride: int, accumulate: int, ring: int,
    ) -> None:  # fmt: skip
        k = groups * GROUP
        totals = ring + RING_BLOCKS * BLOCK_BYTES
        last_x = totals + BLOCK_BYTES
        last_scales = last_x + BLOCK_ROWS * k
        last_scaled_sums = last_scales + BLOCK_ROWS * 4 * groups
        slots = last_scaled_sums + BLOCK_ROWS * 4 * groups
        minima = slots + groups * slot_bytes
        whole = num_rows // BLOCK_ROWS
        blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
        left = num_rows - whole * BLOCK_ROWS
        if left:
            row = whole * BLOCK_ROWS
            copy_filled_up(x + row * k, left * k, last_x, BLOCK_ROWS * k)
            down, size, all_ = 4 * row * groups, 4 * left * groups, 4 * BLOCK_ROWS * groups
            copy_filled_up(scales + down, size, last_scales, all_)
            copy_filled_up(scaled_sums + down, size, last_scaled_sums, all_)
        amx.configure_tiles()
        for panel in range(first_panel, end_panel):
            column = panel * PANEL_COLUMNS
            unpack(weights + panel * groups * tile_bytes, groups, slots)
            if has_minimum:
                make_minima(slots, groups, scaled_sums, last_scaled_sums, whole, blocks, minima)
            multiply_panel(
                slots, groups, x, last_x, scales, last_scales, num_rows, minima, ring, totals,
                out + 4 * column, stride, min(PANEL_COLUMNS, n - column), accumulate,
            )  # fmt: skip
        amx.release_tiles()

    return multiply
