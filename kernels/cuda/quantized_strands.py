"""How a product with quantised weights is dealt out to warps, and what takes M rows.

The weights' panels of 32 outputs (`quantized_layout`) are cut along K into 1, 2, 4 or 8 *strands*
of whole units, a warp each; 8 warps are a block of threads, so a block has 8 / strands panels.

How many strands: the fewest that make 12 warps for each of 132 multiprocessors. N ≤ 12 640 has 8,
14 336 has 4, 28 672 has 2, a vocabulary 1. The number is a constant and M has no say in it, since
strands are summed one after the other: everything else would give an output other bits on another
device or in another batch. Few strands are better for x: the warps of a block that share k's find
it in the first cache, and x of 8 rows is about as many bytes as the Q4 weights of one panel.

Blocks never share a panel. N = 1024, K = 4096 in Q4_0 is 32 blocks of two rounds of their rings; a
second launch, or a wait for the last block, would cost about as much as more blocks save.

Many rows. The kernel goes through W once for every 32 rows of x; a library's product wants W in x's
type, so W is unpacked into scratch memory and read again. With b bytes a packed weight:

    kernel      ⌈M / 32⌉ · b
    unpacked    b + 2 + 2            W read, 16 bits written, 16 bits read

Whichever moves fewer bytes is taken: the kernel up to 256 rows of Q4_0 (b = 0.5625), 224 of Q4_1
(0.625), Q4_Z and Q4_K (0.578), 192 of Q5_K (0.703), 160 of Q6_K (0.82), 128 of Q8_0 (1.0625) and
FP8 (1.125); with larger spans up to 256 and 128.
Blocks side by side find much of W in the second cache, so the kernel moves fewer bytes than that;
but from 32 rows on a pass is bound by the tensor cores and takes about as long as reading Q4_0 from
memory does, while the library has instructions for many rows that the kernel has not. The number is
M's alone: it decides about bits, for what is unpacked is rounded to x's type.
"""

from __future__ import annotations

from typing import Final

from kernels.cuda.quantized_formats import FORMATS, PANEL_ROWS

COLUMNS: Final = (8, 16, 32)
"""Rows of x that a block may take: a variant each."""
WARPS: Final = 8
"""Of a block."""
WARPS_WANTED: Final = 12 * 132
UNPACKED_BYTES: Final = 2 + 2
"""Of a weight that is written to scratch memory and read from there."""


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


def most_rows_of(label: str) -> int:
    """Return for how many rows of x at most the kernel is taken with weights of a format."""
    packed_bytes = FORMATS[label].bits_of_weight / 8
    return COLUMNS[-1] * int((packed_bytes + UNPACKED_BYTES) / packed_bytes)
