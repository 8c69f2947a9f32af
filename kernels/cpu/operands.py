"""The operand words of all operations' records; without the compiler.

What they mean together is said where the operations are: `matrix_product` (Product), `row_inputs`
and `row_values` (RowInput, RowFormat), `rope_write`, `embedding`, `attention` and `sampling`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kernels.cpu.int8_packing import GROUP
from kernels.cpu.operation import FIRST_OPERAND


class Product(IntEnum):
    """The operand words of a product's record."""

    INPUT = FIRST_OPERAND
    INPUT_SCALES = 3
    INPUT_SCALED_SUMS = 4
    INPUT_SUMS = 5
    WEIGHTS = 6
    K = 7
    N = 8
    OUT = 9
    OUT_STRIDE = 10
    """In elements."""
    ACCUMULATE = 11
    """0: OUT is written; 1: the sums are added to it."""
    ROWS_WORD = 12
    """The header word that holds M: StepWord.NUM_TOKENS or NUM_OUT_ROWS."""
    OUT_FIRST_WORD = 13
    """The header word that holds the first row of OUT: FIRST_TOKEN of hidden rows, else ZERO."""
    INPUT_PAIR_SUMS = 14


class RowFormat(IntEnum):
    """In which format rows are written: the operand FORMAT."""

    INT8 = 0
    BF16 = 1
    FLOAT32 = 2


class RowInput(IntEnum):
    """The operand words of these operations."""

    SOURCE = FIRST_OPERAND
    """float32 rows."""
    SOURCE_STRIDE = 3
    """Elements from a row to the next."""
    SOURCE_FIRST_WORD = 4
    """The header word with the first row of SOURCE: FIRST_TOKEN of hidden, else ZERO. Not read by
    sampled_rows."""
    ROWS_WORD = 5
    """The header word with the number of rows."""
    K = 6
    """Elements of a row that is written; a multiple of 32 for int8."""
    FORMAT = 7
    """A RowFormat."""
    OUT = 8
    """The rows, C-contiguous."""
    OUT_SCALES = 9
    OUT_SCALED_SUMS = 10
    OUT_SUMS = 11
    OUT_PAIR_SUMS = 14
    """9–11 and 14: int8 rows only (`kernels.cpu.matrix_product`)."""
    WEIGHT = 12
    """rms_norm only: float32 [K]."""
    ORDER = WEIGHT
    """ordered_rows only: int32 [K], where in the source row each element stands."""
    EPSILON = 13
    """rms_norm only: the bits of a float32."""


ELEMENT_BYTES: Final = {RowFormat.INT8: 1, RowFormat.BF16: 2, RowFormat.FLOAT32: 4}


def row_bytes(row_format: RowFormat, rows: int, k: int) -> int:
    """Return the bytes of `rows` rows at OUT; of int8 rows without what stands beside them."""
    return rows * k * ELEMENT_BYTES[row_format]


def group_bytes(rows: int, k: int) -> int:
    """Return the bytes of each of OUT_SCALES, OUT_SCALED_SUMS, OUT_SUMS and OUT_PAIR_SUMS."""
    return 4 * rows * (k // GROUP)


class RopeAngles(IntEnum):
    """Operands of `rope_angles`; rows of COSINES and SINES begin at StepWord.FIRST_TOKEN."""

    FREQUENCIES = 2
    """float32 [HALF]: angle of each pair per position."""
    COSINES = 3
    """float32 [T_all, HALF]."""
    SINES = 4
    HALF = 5
    """D / 2."""
    FACTORS = 6
    """float32 [HALF]: what cosine and sine of each pair are multiplied by."""


class RopeWrite(IntEnum):
    """Operands of ROPE_WRITE; QKV has a row a token of the piece, others begin at FIRST_TOKEN."""

    QKV = 2
    """float32 [T, (H + 2·G)·D]."""
    COSINES = 3
    """float32 [T_all, D/2]."""
    SINES = 4
    QUERIES = 5
    """float32 [T_all, H·D], out."""
    POOL = 6
    """Address of this layer in block 0."""
    BLOCK_BYTES = 7
    HEAD_BYTES = 8
    """`KvLayout.head_bytes`."""
    BLOCK_SIZE = 9
    HEAD_DIM = 10
    NUM_HEADS = 11
    NUM_KV_HEADS = 12
    BIAS = 13
    """float32 [(H + 2·G)·D], or 0: nothing is added."""
    QUERY_NORM = 14
    """float32 [D], or 0: heads are not normalised; the same of KEY_NORM."""
    KEY_NORM = 15
    EPSILON = 16
    """The bits of a float32."""


class EmbeddingRecord(IntEnum):
    """The operand words of an embedding's record."""

    WEIGHTS = FIRST_OPERAND
    """The packed matrix [V, K]."""
    K = 3
    OUT = 4
    """float32 [tokens of the step, K]; the piece's first token goes to row FIRST_TOKEN."""
    SCALE = 5
    """What rows are multiplied by, the bits of a float32, or 0: they are not."""


class Attention(IntEnum):
    """Operands of ATTENTION and `merge_attention`."""

    QUERIES = 2
    """float32 [T_all, H·D], from `rope_write`; the piece's rows begin at StepWord.FIRST_TOKEN."""
    OUT = 3
    """float32 [T, H·D]."""
    POOL = 4
    """Address of this layer in block 0."""
    BLOCK_BYTES = 5
    HEAD_BYTES = 6
    """`KvLayout.head_bytes`."""
    BLOCK_SIZE = 7
    HEAD_DIM = 8
    NUM_HEADS = 9
    NUM_KV_HEADS = 10
    PARTIALS = 11
    """float32 [I, H, 16 + D']: maximum, sum of weights and, from 16, weighted V of the items that
    are segments. 64-byte aligned; not used where no item is one."""


class Item(IntEnum):
    """The words of an attention item, int32."""

    TOKEN = 0
    NUM_TOKENS = 1
    TABLE = 2
    """Row of the block tables."""
    SEGMENT = 3
    """0: the whole context. s + 1: segment s only, of one token; the result is a partial."""


class Merge(IntEnum):
    """The words of a merge, int32: a token whose context is shared among items."""

    TOKEN = 0
    FIRST_ITEM = 1
    NUM_ITEMS = 2
    """Items of the token's segments, in their order."""


LOGITS: Final = FIRST_OPERAND
"""Operand: address of float32 [O, LOGITS_STRIDE]; columns from V on are not read."""
LOGITS_STRIDE: Final = FIRST_OPERAND + 1
"""Operand, in elements."""
VOCAB: Final = FIRST_OPERAND + 2
"""Operand: V."""
