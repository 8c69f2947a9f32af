"""How a product with quantised weights is dealt out to warps, and which variant M rows take.

The weights' panels of 32 outputs (`quantized_layout`) are cut along K into 1, 2, 4 or 8 *strands*,
a warp each; 8 warps are a block of threads, so a block has 8 / strands panels.

How many strands: the fewest that make 12 warps for each of 132 multiprocessors. N ≤ 12 640 has 8,
14 336 has 4, 28 672 has 2, a vocabulary 1. The number is a constant and M has no say in it, since
strands are summed one after the other: everything else would give an output other bits on another
device or in another batch. Few strands are better for x: the warps of a block that share k's find
it in the first cache, and x of 8 rows is about as many bytes as the Q4 weights of one panel.

Blocks never share a panel. N = 1024, K = 4096 in Q4_0 is 32 blocks of two rounds of their rings; a
second launch, or a wait for the last block, would cost about as much as more blocks save.
"""

from __future__ import annotations

from typing import Final

from kernels.cuda.quantized_layout import PANEL_ROWS

COLUMNS: Final = (8, 16, 32)
"""Rows of x that a block may take: a variant each."""
WARPS: Final = 8
"""Of a block."""
WARPS_WANTED: Final = 12 * 132


def strand_bits_of(num_outputs: int) -> int:
    """Return log2 of the strands of a matrix of N outputs. It must depend on nothing else."""
    num_panels = -(-num_outputs // PANEL_ROWS)
    most = WARPS.bit_length() - 1
    return next((bits for bits in range(most) if num_panels << bits >= WARPS_WANTED), most)


def blocks_of(num_outputs: int, strand_bits: int) -> int:
    """Return how many blocks of threads the panels of N outputs fill."""
    block_outputs = PANEL_ROWS * (WARPS >> strand_bits)
    return -(-num_outputs // block_outputs)


def columns_of(num_rows: int) -> int:
    """Return the `columns` of the variant for M rows: the fewest that hold them, or the most."""
    return next((columns for columns in COLUMNS if columns >= num_rows), COLUMNS[-1])
