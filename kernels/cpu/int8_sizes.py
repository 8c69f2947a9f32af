"""Sizes that products of int8 rows have on this process's instruction set; without the compiler."""

from __future__ import annotations

from typing import Final

from kernels.cpu.float_sizes import TileSizes
from kernels.cpu.instruction_set import InstructionSet, selected_instruction_set
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES

SET: Final = selected_instruction_set()


def int8_tile_sizes(chosen: InstructionSet) -> TileSizes:
    """Return tiles whose sums, weights and input fit the set's registers.

    512 bits, 32 registers: 6 · 2 integer and 6 · 2 float sums, 4 weights, 1 input. 256 bits, 16
    registers, two to a vector of 16 lanes: 4 · 1 integer sums, weights and input; float sums, which
    are added to once in 32 k's, stay in memory from 2 rows on. 128 bits, 32 registers: 2 · 1 of
    each sum, as no other was measured; 16 registers: 1 row.
    """
    if chosen.vector_bits == 512:
        return TileSizes(6, 2, 12)
    if chosen.vector_bits == 256:
        return TileSizes(4, 1, 1)
    return TileSizes(2, 1, 2) if chosen.vector_registers == 32 else TileSizes(1, 1, 1)


def wide_tile_sizes(chosen: InstructionSet) -> tuple[TileSizes, ...]:
    """Return the tiles that few rows prefer, the widest first; `int8_wide_product` says why.

    512 bits: 1 · 8 integer and 1 · 8 float sums, or up to 6 · 4 integer ones, with float sums in
    memory from 4 rows on. 256 bits: 1 · 4 or 1 · 2 integer sums, two registers each. 128 bits:
    none; they were not measured.
    """
    if chosen.vector_bits == 512:
        return (TileSizes(1, 8, 8), TileSizes(6, 4, 12))
    if chosen.vector_bits == 256:
        return (TileSizes(1, 4, 1), TileSizes(1, 2, 1))
    return ()


BLOCK_ROWS: Final = 16
TILE_BYTES: Final = GROUP * PANEL_COLUMNS
"""Of a tile of unpacked weights."""
BLOCK_BYTES: Final = BLOCK_ROWS * VECTOR_BYTES
"""Of the integers, or the float sums, of a block of rows and a panel."""
RING_BLOCKS: Final = 4


def amx_scratch_bytes(k: int) -> int:
    """Return the scratch memory a worker needs for a product with `k` inputs."""
    groups = k // GROUP
    last = BLOCK_ROWS * (k + 2 * 4 * groups)
    return (RING_BLOCKS + 1) * BLOCK_BYTES + last + groups * TILE_BYTES


TILE_ROWS: Final = 5
TILE_PANELS: Final = 2
"""5 · 2 integer and 5 · 2 float sums, 4 weights, 4 sums of them with a row: 32 registers are full
before a sixth row."""
VECTORS: Final = 4
"""Vectors of A, and of B, of a group."""
SUMS_AT: Final = 2 * VECTORS * VECTOR_BYTES
FACTORS_AT: Final = SUMS_AT + VECTOR_BYTES
PREPARED_BYTES: Final = FACTORS_AT + 3 * VECTOR_BYTES
RUN_BYTES: Final = 384 << 10
"""Of the prepared panels that a tile of rows meets before the next one comes; two panels of more
than 8192 inputs are more, and of more than about 20000 more than the second-level cache."""
SUMS_ROW_BYTES: Final = 4 * TILE_PANELS * PANEL_COLUMNS
SUMS_BYTES: Final = TILE_ROWS * SUMS_ROW_BYTES


def pair_scratch_bytes(k: int) -> int:
    """Return the scratch memory a worker needs for a product with `k` inputs."""
    return SUMS_BYTES + max(RUN_BYTES, TILE_PANELS * (k // GROUP) * PREPARED_BYTES)


SIZES: Final = int8_tile_sizes(SET)
GROUP_PANELS: Final = SIZES.panels
WIDTH: Final = GROUP_PANELS * PANEL_COLUMNS
MOST_ROWS: Final = SIZES.rows
MOST_ROWS_OF_PARTS: Final = min(4, MOST_ROWS)
"""Of formats whose groups have two parts, with sums of their own: six would need more
registers, which wide tiles, waiting for memory, spill."""
HAS_AMX: Final = SET.has_amx
PAIRS_PRODUCTS: Final = SET.pairs_products


SUMS_OF_TILE_BYTES: Final = VECTOR_BYTES * max(
    sizes.rows * sizes.panels for sizes in (SIZES, *wide_tile_sizes(SET))
)
MOST_UNPACKED_BYTES: Final = 2 * VECTOR_BYTES + TILE_BYTES
"""Of a tile of any format (`kernels.cpu.int8_unpacking`)."""


def int8_scratch_bytes(k: int) -> int:
    """Return the scratch memory a worker needs for a product with `k` inputs."""
    vectors = SUMS_OF_TILE_BYTES + k // GROUP * GROUP_PANELS * MOST_UNPACKED_BYTES
    if PAIRS_PRODUCTS:
        return max(vectors, pair_scratch_bytes(k))
    return max(vectors, amx_scratch_bytes(k) if HAS_AMX else 0)
