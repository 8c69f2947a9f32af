"""The operand words of all operations' records; without the compiler.

What they mean together is said where the operations are: `matrix_product` (Product), `row_inputs`
and `row_values` (RowInput, RowFormat), `normed_sums` (NormedSum), `rope_write`, `embedding`,
`attention` and `sampling`. Those whose rows go on from states: `kernels.cpu.state_operands`.
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
    INPUT_BEGINS = 15


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
    OUT_BEGINS = 16
    """9–11, 14 and 16: int8 rows only (`kernels.cpu.matrix_product`)."""
    WEIGHT = 12
    """rms_norm only: float32 [K]."""
    ORDER = WEIGHT
    """ordered_rows only: int32 [K], where in the source row each element stands."""
    BIASES = WEIGHT
    """clamped_rows only: float32 [E, 2 · K], added to gate and up of the rows of each expert."""
    EPSILON = 13
    """rms_norm only: the bits of a float32."""
    RUNS = EPSILON
    """clamped_rows only: the rows of each expert, as in `Routing`."""
    NUM_GROUPS = 15
    """grouped_rows only: of as many groups, each a multiple of 32 elements, a row is."""
    UPS = WEIGHT
    """gelu_rows_apart only: float32 rows, those of the piece from StepWord.FIRST_TOKEN on."""
    UPS_STRIDE = NUM_GROUPS
    """gelu_rows_apart only: elements from a row of UPS to the next."""


class BiasRecord(IntEnum):
    """Operands of `add_bias`."""

    OUT = FIRST_OPERAND
    """float32 [T, N]."""
    N = 3
    BIAS = 4
    """float32 [N]."""
    OUT_FIRST_WORD = 5
    """The header word that holds the first row of OUT, as in `Product`."""


class NormedSum(IntEnum):
    """Operands of `add_normed_rows`."""

    SOURCE = FIRST_OPERAND
    """float32 [T, PARTS, K]."""
    K = 3
    HIDDEN = 4
    """float32 [T_all, PARTS, K]; the piece's tokens begin at StepWord.FIRST_TOKEN."""
    WEIGHT = 5
    """float32 [K]."""
    EPSILON = 6
    """The bits of a float32."""
    SCALE = 7
    """What sums are multiplied by, the bits of a float32."""
    PARTS = 8
    """Rows of a token, each normalised for itself."""
    SOURCE_FIRST_WORD = 9
    """The header word with the first token of SOURCE: FIRST_TOKEN if it has all, else ZERO."""
    BASE = 10
    """float32 [K], to which norms are added in place of what HIDDEN holds, or 0: to that."""


class TakenRows(IntEnum):
    """Operands of `take_rows`."""

    ROWS = FIRST_OPERAND
    """[T_all], of ROW_BYTES bytes."""
    ROW_BYTES = 3


class LogitsCap(IntEnum):
    """Operands of `cap_logits`."""

    LOGITS = FIRST_OPERAND
    """float32 [O, V], in place."""
    VOCAB = 3
    """V."""
    CAP = 4
    """The bits of a float32."""


ELEMENT_BYTES: Final = {RowFormat.INT8: 1, RowFormat.BF16: 2, RowFormat.FLOAT32: 4}


def row_bytes(row_format: RowFormat, rows: int, k: int) -> int:
    """Return the bytes of `rows` rows at OUT; of int8 rows without what stands beside them."""
    return rows * k * ELEMENT_BYTES[row_format]


def group_bytes(rows: int, k: int) -> int:
    """Return the bytes of each of what stands beside int8 rows: OUT_SCALES … OUT_BEGINS."""
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
    """float32 [T, (H + 2·G)·D]; G 0: keys and values are an earlier layer's, none are written."""
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
    VALUE_NORM = 19
    """float32 [D], or 0: values are not normalised."""
    GROWTH = 17
    """float32 [n], or 0: what queries at positions from i · GROWTH_LENGTH on are multiplied by."""
    GROWTH_LENGTH = 18


class JointNorms(IntEnum):
    """Operands of `joint_norms`; all rows the piece's."""

    QKV = FIRST_OPERAND
    """float32 [T, QUERY_SIZE + 2·KEY_SIZE]: of the values nothing changes."""
    QUERY_SIZE = 3
    KEY_SIZE = 4
    QUERY_NORM = 5
    """float32 [QUERY_SIZE]; KEY_NORM: [KEY_SIZE]."""
    KEY_NORM = 6
    EPSILON = 7
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
    """float32 [T_all, H·D], from `rope_write`; the piece's rows begin where QUERIES_FIRST_WORD
    says."""
    OUT = 3
    """float32 [T, H·V]."""
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
    """float32 [slots, H, 16 + V']: maximum, sum of weights and, from 16, weighted V of segments of
    contexts that are cut. 64-byte aligned; not used where none is."""
    WINDOW = 12
    """Positions that a token sees, the last ones up to its own; 0: all."""
    SINKS = 13
    """float32 [H], in powers of 2: a score of each query head that no token has; or 0: none has
    one."""
    VALUE_DIM = 14
    """V: elements of a value; D of those that are as long as keys."""
    HEAD_STRIDE = 15
    """Bytes from what a kv head reads to what the next one does: HEAD_BYTES, or 0 where all read
    the same."""
    QUERIES_FIRST_WORD = 16
    """The header word with the piece's first row of QUERIES: FIRST_TOKEN, or ZERO."""
    CAP = 17
    """Bits of a float32, in powers of 2: c of scores that are c · tanh(x / c); 0: they are x."""


class Item(IntEnum):
    """The words of an attention item, int32."""

    FIRST = 0
    """Place of its first token in StepWord.ATTENTION_TOKENS; their positions ascend."""
    NUM_TOKENS = 1
    TABLE = 2
    """Row of the block tables; of tokens of several rows, any of theirs."""
    SEGMENT = 3
    """0: the whole context, of tokens of one row. s + 1: segment s only, which all its tokens have
    in the same blocks; the results are partials. There is none of a segment before the window."""


class Merge(IntEnum):
    """The words of a merge, int32: a token whose context is cut into segments."""

    TOKEN = 0
    NUM_SEGMENTS = 1
    """Their partials follow each other from the token's StepWord.PARTIAL_SLOTS on."""


class Routing(IntEnum):
    """Operands of the operations of `kernels.cpu.routing`.

    T tokens of the piece, E experts, C chosen by each token; R = T · C rows, sorted by expert.
    """

    LOGITS = FIRST_OPERAND
    """float32 [T, E]: the router's; add_shared: [T], of what gates what the shared MLP gave."""
    NUM_EXPERTS = 3
    PER_TOKEN = 4
    """C."""
    NORMALISES = 5
    """1: weights are scores over the sum of those of the chosen experts; 0: they are scores."""
    CHOSEN = 6
    """int32 [T, C]: each token's experts, the likeliest first; of equal ones the lower number."""
    WEIGHTS = 7
    """float32 [T, C]."""
    PLACES = 8
    """int32 [T, C]: the row in which a token meets each of its experts."""
    TOKENS = 9
    """int32 [R]: the token of each row."""
    RUNS = 10
    """int32 [1 + 3 · E]: how many experts have rows; of each of these its number, its first row
    and how many rows."""
    SOURCE = 11
    """rows_of_experts: rows of the tokens; add_experts: float32 [R, N], what the experts gave;
    add_shared: float32 [T, N], what the shared MLP gave."""
    OUT = 12
    """rows_of_experts: the rows, each token's as it is; add_experts, add_shared: float32 rows,
    added to."""
    ROW_BYTES = 13
    """rows_of_experts only: of SOURCE and OUT."""
    BESIDE = 14
    """rows_of_experts only, of int8 rows: int64 [NUM_BESIDE, 2], addresses of what stands beside
    the rows of SOURCE and of OUT (`matrix_product`), GROUP_BYTES a row; 0: nothing does."""
    GROUP_BYTES = 15
    N = 16
    """add_experts, add_shared: elements of a row."""
    BIASES = 17
    """add_experts only: float32 [E, N], added to what experts gave before that is weighed; or 0."""
    IS_SIGMOID = 18
    """route_tokens only. 0: scores are a softmax over all experts; 1: the sigmoid of each."""
    CORRECTION = 19
    """route_tokens only: float32 [E], what scores have added where experts are chosen; or 0."""
    SCALE = 20
    """route_tokens only: address of a float32, what weights are multiplied by; or 0."""
    NUM_GROUPS = 21
    """route_tokens only: groups of E / NUM_GROUPS experts, of which a token chooses some, by the
    largest score of each, or with a CORRECTION by the sum of two; 0: it may choose any expert."""
    GROUPS_PER_TOKEN = ROW_BYTES
    """route_tokens only: how many it chooses, if there are any."""
    EXPERT_SCALES = BIASES
    """route_tokens only: float32 [E], what the weights of each expert are multiplied by; or 0."""
    NORM = CORRECTION
    """add_experts only: float32 [N], the weights of rms_norm of what is added; or 0: of nothing."""
    EPSILON = NUM_GROUPS
    """add_experts only: of the norm, the bits of a float32."""


NUM_BESIDE: Final = 5


class ExpertProduct(IntEnum):
    """Operands of `expert_product`."""

    RECORD = FIRST_OPERAND
    """Address of a product's record (`Product`) for the first expert and the first row, with its
    rows in StepWord.NUM_TOKENS and OUT from row 0 on. Its CHUNKS are those of each expert's
    product."""
    RUNS = 3
    """As in `Routing`."""
    WEIGHTS_BYTES = 4
    """From an expert's weights to the next one's."""
    INPUT_BYTES = 5
    """Of a row of INPUT."""
    GROUP_BYTES = 6
    """Of what stands beside a row of int8."""
    OUT_BYTES = 7
    """From a row of OUT to the next."""


class AttentionGate(IntEnum):
    """Operands of `gate_attended`: OUT float32 [T, N], GATES float32 [T, GATES_STRIDE]."""

    OUT = FIRST_OPERAND
    N = 3
    GATES = 4
    GATES_STRIDE = 5


LOGITS: Final = FIRST_OPERAND
"""Operand: address of float32 [O, LOGITS_STRIDE]; columns from V on are not read."""
LOGITS_STRIDE: Final = FIRST_OPERAND + 1
"""Operand, in elements."""
VOCAB: Final = FIRST_OPERAND + 2
"""Operand: V."""
