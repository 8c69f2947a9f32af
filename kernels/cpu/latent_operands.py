"""The operand words of operations of attention over latents; without the compiler.

Letters: `kernels.reference.latent_attention`, and N elements of a query head that meet latents.
"""

from __future__ import annotations

from enum import IntEnum

from kernels.cpu.operation import FIRST_OPERAND, RECORD_WORDS

HEAD_CALL_BYTES = 8 * RECORD_WORDS
"""At the end of a worker's scratch memory: what one head's operation is called with, behind
whatever that operation needs."""


class HeadCalls(IntEnum):
    """Operands of `rows_of_heads` and `products_of_heads`: bytes from one head's to the next's."""

    RECORD = FIRST_OPERAND
    """Address of the record of the first head, of a row input (`RowInput`) or a `Product`."""
    NUM_HEADS = 3
    SOURCE_BYTES = 4
    """rows_of_heads: of SOURCE; products_of_heads: of WEIGHTS."""
    ROWS_BYTES = 5
    """Of the rows between both."""
    BESIDE_BYTES = 6
    """Of what stands beside rows of int8."""
    OUT_BYTES = 7
    """products_of_heads only: of OUT."""


class LatentWrite(IntEnum):
    """Operands of LATENT_WRITE; all rows the piece's, but for those of COSINES and SINES."""

    INPUTS = FIRST_OPERAND
    """float32 [T, R + P]."""
    RANK = 3
    TURNING = 4
    WEIGHT = 5
    """float32 [R], of the norm; EPSILON: the bits of a float32."""
    EPSILON = 6
    COSINES = 7
    """float32 [T_all, P/2], from StepWord.FIRST_TOKEN on; SINES likewise."""
    SINES = 8
    POOL = 9
    """Address of this layer in block 0."""
    BLOCK_BYTES = 10
    HEAD_BYTES = 11
    """`KvLayout.head_bytes`."""
    BLOCK_SIZE = 12


class LatentQueries(IntEnum):
    """Operands of `latent_queries`; all rows the piece's, but for those of COSINES and SINES."""

    SOURCE = FIRST_OPERAND
    """float32 [T, H·(N + P)]: query heads as their product gives them."""
    QUERIES = 3
    """float32 [T, H·(R + P)], of which the first R of each head are there."""
    NUM_HEADS = 4
    PLAIN = 5
    """N."""
    RANK = 6
    TURNING = 7
    SCALE = 8
    """What all elements are multiplied by: the scores' scale · log2(e), the bits of a float32."""
    COSINES = 9
    """As of `LatentWrite`."""
    SINES = 10
