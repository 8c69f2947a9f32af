"""The loop around the AMX kernel: a run of panels times all rows of a step.

Scratch memory of a worker, G = K/32:

    │ ring 4 KiB │ sums of a block 1 KiB │ last rows 16·K │ scales 64·G │ scaled sums 64·G │
    │ unpacked panel 512·G │

The rows that are left after the last whole block of 16 are copied there, filled up with zeros, so
that nothing behind the last row is ever read.

Workers with an odd number, who claim their chunks from the back, walk backwards through a chunk
too: what is fetched ahead is then what they claim next.
"""

from __future__ import annotations

from typing import Any

from numba import carray

from kernels.cpu.amx_tiles import release_tiles
from kernels.cpu.compiled import inlined, uint8_at
from kernels.cpu.int8_amx import FEWEST_GROUPS, panels_multiplier
from kernels.cpu.int8_amx_tiles import configure_tiles, unpacker
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, Int8Format
from kernels.cpu.int8_sizes import BLOCK_BYTES, BLOCK_ROWS, RING_BLOCKS
from kernels.cpu.int8_weights import panel_sizer


@inlined()
def copy_filled_up(source: int, size: int, target: int, whole_size: int) -> None:
    """Copy `size` bytes, and zeros behind them."""
    # Byte by byte, which becomes memcpy and memset: slices would bring Numba's errors and copies.
    from_, to = carray(uint8_at(source), size), carray(uint8_at(target), whole_size)
    for i in range(size):
        to[i] = from_[i]
    for i in range(size, whole_size):
        to[i] = 0


def amx_product(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the function that multiplies all rows with a run of panels."""
    unpack, multiply_panels = unpacker(fmt), panels_multiplier(fmt)
    panel_size, is_nibbles = panel_sizer(fmt), fmt.is_nibbles

    @inlined()
    def multiply(
        x: int, scales: int, scaled_sums: int, num_rows: int, groups: int, weights: int,
        first_panel: int, end_panel: int, n: int, out: int, stride: int, accumulate: int, ring: int,
        worker: int,
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
        configure_tiles()
        count, begin, step = end_panel - first_panel, first_panel, 1
        if worker & 1:
            begin, step = end_panel - 1, -1
        at_once = count if groups >= FEWEST_GROUPS else 1
        panel_bytes = panel_size(groups)
        done = 0
        while done < count:  # a range whose step is no constant could raise
            panel = begin + step * done
            column = panel * PANEL_COLUMNS
            packed = weights + panel * panel_bytes
            if is_nibbles:
                unpack(packed, groups, unpacked)
            multiply_panels(
                packed, step * panel_bytes, at_once, unpacked, groups, x, last_x, scales,
                last_scales, scaled_sums, last_scaled_sums, num_rows, ring, totals,
                out + 4 * column, 4 * PANEL_COLUMNS * step, stride, n - column, accumulate,
            )  # fmt: skip
            done += at_once
        release_tiles()

    return multiply
