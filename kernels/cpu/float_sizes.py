"""Sizes that products with floating-point weights have on this process's instruction set.

Nothing here needs the compiler: what makes tables asks for it at every start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kernels.cpu.float_packing import AMX_DEPTH, PANEL_COLUMNS
from kernels.cpu.instruction_set import InstructionSet, selected_instruction_set

SET: Final = selected_instruction_set()


@dataclass(frozen=True, slots=True)
class TileSizes:
    """The tiles of an instruction set.

    `rows`: of the largest; there are tiles of every number up to it, and M rows are cut into the
    fewest that hold them, of equal sizes. `panels`: of every tile. `sums`: float sums of a row and
    a panel that registers hold at once. A tile of floats with more of them is computed a few panels
    after the other, one of integers keeps them in memory.
    """

    rows: int
    panels: int
    sums: int

    def panels_at_once(self, rows: int) -> int:
        """Return how many panels of a tile of so many rows registers hold the sums of."""
        return max(1, min(self.panels, self.sums // rows))


def tile_sizes(chosen: InstructionSet) -> TileSizes:
    """Return tiles whose accumulators, weights and input fit the set's registers.

    512 bits, 32 registers: 8 · 3 accumulators, 3 weights, 1 input. 256 bits, 16 registers, two to
    a vector of 16 lanes: 4 · 1 · 2 accumulators, as many as keep two multipliers busy, 2 weights
    as they are and 2 widened, 1 input; one row, which has fewer, waits for memory. 128 bits: one
    row of 12.
    """
    if chosen.vector_bits == 512:
        return TileSizes(8, 3, 24)
    if chosen.vector_bits == 256:
        return TileSizes(4, 2, 4)
    return TileSizes(2, 3, 6)


def wide_tile_sizes(chosen: InstructionSet) -> TileSizes | None:
    """Return the tile that few rows prefer, whose panels are some of the others' together.

    Memory gives more where more panels are read (`int8_wide_product`). 512 bits: 4 · 6
    accumulators. 256 bits: 1 · 4 · 2. 128 bits: None; it was not measured.
    """
    if chosen.vector_bits == 512:
        return TileSizes(4, 6, 24)
    return TileSizes(1, 4, 4) if chosen.vector_bits == 256 else None


TILE_ROWS: Final = 16
BLOCK_ROWS: Final = 2 * TILE_ROWS
BLOCK_PANELS: Final = 2
ROW_BYTES: Final = 64
TILE_BYTES: Final = TILE_ROWS * ROW_BYTES
BLOCK_BYTES: Final = 2 * BLOCK_PANELS * TILE_BYTES
"""Of the sums of a block, 32 rows of 32 float32."""
PART_TILES: Final = 64
"""k tiles that are multiplied at once, about: sums of longer rows are kept in memory in between."""
GROUP_PAIRS: Final = 8
GROUP_BYTES: Final = GROUP_PAIRS * BLOCK_PANELS * PART_TILES * TILE_BYTES
"""Pairs of panels, and their bytes, that one block of rows meets before the next block comes: they
stay in the second-level cache, and are unpacked once for TOGETHER_ROWS rows."""
TOGETHER_ROWS: Final = 512
TAIL_BYTES: Final = 2 * AMX_DEPTH
UNFINISHED_BYTES: Final = TOGETHER_ROWS // BLOCK_ROWS * GROUP_PAIRS * BLOCK_BYTES
FIXED_BYTES: Final = BLOCK_BYTES + UNFINISHED_BYTES + BLOCK_ROWS * TAIL_BYTES


def amx_scratch_bytes(*, is_quantised: bool) -> int:
    """Return the scratch memory a worker needs for a product in the tile registers."""
    return FIXED_BYTES + (GROUP_BYTES if is_quantised else 0)


SIZES: Final = tile_sizes(SET)
WIDE_SIZES: Final = wide_tile_sizes(SET)
GROUP_PANELS: Final = SIZES.panels
MOST_ROWS: Final = SIZES.rows


def float_scratch_bytes(*, is_quantised: bool = False) -> int:
    """Return the scratch memory a worker needs for a product, whatever its size."""
    vectors = (
        4 * PANEL_COLUMNS * max(sizes.rows * sizes.panels for sizes in (SIZES, WIDE_SIZES or SIZES))
    )
    return max(vectors, amx_scratch_bytes(is_quantised=is_quantised) if SET.has_amx else 0)
