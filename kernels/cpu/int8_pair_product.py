"""The loop around the tiles that make two products of one: a run of panels times all rows.

    for runs of panels that the second-level cache holds        prepared here, once
        for tiles of 5 rows
            for pairs of panels of the run                      the rows stay in the first level

The last tile begins where it is whole: what it computes a second time is not written.

Scratch memory of a worker:  │ sums of a tile │ prepared panels │
"""

from __future__ import annotations

from typing import Any, Final

from kernels.cpu.compiled import inlined
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, Int8Format
from kernels.cpu.int8_pair_tile import pair_preparer, pair_tile
from kernels.cpu.int8_sizes import (
    PREPARED_BYTES,
    RUN_BYTES,
    SUMS_BYTES,
    SUMS_ROW_BYTES,
    TILE_PANELS,
    TILE_ROWS,
)
from kernels.cpu.matrix_product import sums_writer

PAIR_ROWS: Final = 64
"""From so many rows on it pays to prepare panels; a tile must have its rows."""
PAIRED_BITS: Final = 4
"""Bits of the weights for which the numbers of pairs fit bytes."""


def pair_product(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the product of a 4-bit format with PAIR_ROWS rows or more.

    (x, scales, scaled_sums, sums, pair_sums, rows, groups, weights, panel, first, end, n, out,
    stride, accumulate, memory): panels `first` to `end`, of `panel` bytes, of a matrix of n
    columns.
    """
    chosen = selected_instruction_set()
    prepare, tile = pair_preparer(fmt, chosen), pair_tile(fmt, chosen)
    write_sums = sums_writer(TILE_PANELS)

    @inlined()
    def multiply(
        x: int, scales: int, scaled_sums: int, sums: int, pair_sums: int, num_rows: int,
        groups: int, weights: int, panel: int, first: int, end: int, n: int, out: int, stride: int,
        accumulate: int, memory: int,
    ) -> None:  # fmt: skip
        prepared = memory + SUMS_BYTES
        size = groups * PREPARED_BYTES
        run = max(1, RUN_BYTES // (TILE_PANELS * size)) * TILE_PANELS
        for start in range(first, end, run):
            stop = min(start + run, end)
            for p in range(start, stop):
                prepare(weights + p * panel, groups, panel, prepared + (p - start) * size)
            for r in range(0, num_rows, TILE_ROWS):
                row = min(r, num_rows - TILE_ROWS)
                known = r - row
                down = 4 * row * groups
                for p in range(start, stop, TILE_PANELS):
                    second = size if p + 1 < stop else 0
                    tile(
                        x + row * groups * GROUP, scales + down, scaled_sums + down, sums + down,
                        pair_sums + down, groups, prepared + (p - start) * size, second, memory,
                    )  # fmt: skip
                    column = p * PANEL_COLUMNS
                    columns = min(n, stop * PANEL_COLUMNS) - column
                    target = out + 4 * (r * stride + column)
                    write_sums(
                        memory + known * SUMS_ROW_BYTES, TILE_ROWS - known, columns, target,
                        stride, accumulate,
                    )  # fmt: skip

    return multiply
