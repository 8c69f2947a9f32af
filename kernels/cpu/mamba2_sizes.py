"""Sizes of the scratch memory that Mamba-2 needs; without the compiler.

Letters are those of `kernels.reference.mamba2`; N is a multiple of 32, P of 16.

A layer's part of a state, at an address that is a multiple of 64:

    float32 [K − 1, C]             the last rows that went into the convolution, the oldest first
    float32 [H, P / 32, N, 32]     of each head its memory, in blocks of 32 columns; the last one
                                   of 16 where P is no multiple of 32

A worker's scratch memory:

    float32 [2, SUB_BLOCK]         Δ and α of a head
    float32 [2, SUB_BLOCK, 32]     Δ · x and Sᵀ c of a block of columns
"""

from __future__ import annotations

from typing import Final

SUB_BLOCK: Final = 32
"""Tokens that go through a block of columns before the next block's turn."""
COLUMNS: Final = 32
"""Columns of a head's memory that lie together."""
LAST_COLUMNS: Final = 16
"""The same of a last block of fewer."""
SCRATCH_BYTES: Final = 4 * 2 * SUB_BLOCK * (1 + COLUMNS)
