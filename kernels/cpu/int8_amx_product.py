"""The loop around the AMX kernel: a run of panels times all rows of a step.

Scratch memory of a worker, G = K/32:

    │ ring 4 KiB │ sums of a block 1 KiB │ last rows 16·K │ scales 64·G │ scaled sums 64·G │
    │ unpacked panel 512·G │

The rows that are left after the last whole block of 16 are copied there, filled up with zeros, so
that nothing behind the last row is ever read.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from kernels.cpu import int8_amx as amx
from kernels.cpu.int8_amx import BLOCK_BYTES, BLOCK_ROWS, RING_BLOCKS, TILE_BYTES
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, Int8Format
from kernels.cpu.operation import inlined, uint8_at


def amx_scratch_bytes(k: int) -> int:
    """Return the scratch memory a worker needs for a product with `k` inputs."""
    groups = k // GROUP
    last = BLOCK_ROWS * (k + 2 * 4 * groups)
    return (RING_BLOCKS + 1) * BLOCK_BYTES + last + groups * TILE_BYTES


@inlined()
def copy_filled_up(source: int, size: int, target: int, whole_size: int) -> None:
    """Copy `size` bytes, and zeros behind them."""
    from_, to = carray(uint8_at(source), size), carray(uint8_at(target), whole_size)
    to[:size] = from_
    to[size:] = 0


def amx_product(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the function that multiplies all rows with a run of panels."""
    unpack, multiply_panel = amx.unpacker(fmt), amx.panel_multiplier(fmt)
    tile_bytes, is_nibbles = fmt.tile_bytes, fmt.is_nibbles

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
        unpacked = last_scaled_sums + BLOCK_ROWS * 4 * groups
        whole = num_rows // BLOCK_ROWS
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
            packed = weights + panel * groups * tile_bytes
            tiles, tile_stride = packed, tile_bytes
            if is_nibbles:
                unpack(packed, groups, unpacked)
                tiles, tile_stride = unpacked, TILE_BYTES
            multiply_panel(
                packed, tiles, tile_stride, groups, x, last_x, scales, last_scales, scaled_sums,
                last_scaled_sums, num_rows, ring, totals, out + 4 * column, stride,
                min(PANEL_COLUMNS, n - column), accumulate,
            )  # fmt: skip
        amx.release_tiles()

    return multiply
