"""Sizes of attention's work and of the scratch memory it needs; without the compiler."""

from __future__ import annotations

from typing import Final

from kernels.cpu.kv_layout import LANES, SUB_BLOCK_TOKENS

SUB_BLOCKS: Final = 4
"""Sub-blocks of a super-block."""
SUPER_BLOCK_TOKENS: Final = SUB_BLOCKS * LANES
ROW_BLOCK: Final = 16
"""Rows that go through a super-block together: scores and weights of one row block stay in L1."""
SCORE_ROW_BYTES: Final = 4 * SUPER_BLOCK_TOKENS
PAIR_ROW_BYTES: Final = 2 * SUPER_BLOCK_TOKENS
PLACE_WORDS: Final = 40
SEGMENT: Final = 16
"""Super-blocks of a segment: 1024 tokens where B is a multiple of 16."""
STATE_BYTES: Final = 128
"""Of a row: a cache line with its maximum (float32), `LIMIT` and `FIRST` (int64), then 16 partial
sums of its weights (float32)."""
SUMS_BYTES: Final = 64
"""Of a row: maximum and sum of weights of the segments before, a cache line."""
# Scratch memory of a worker: parts of fixed size (weights of two row blocks), then parts that grow
# with rows and D'.
PLACES_AT: Final = 0
POSITIONS_AT: Final = PLACES_AT + 8 * PLACE_WORDS
SCORES_AT: Final = POSITIONS_AT + 4 * SUPER_BLOCK_TOKENS
WEIGHTS_AT: Final = SCORES_AT + ROW_BLOCK * SCORE_ROW_BYTES
ROWS_AT: Final = WEIGHTS_AT + 2 * ROW_BLOCK * PAIR_ROW_BYTES


def attention_scratch_bytes(head_dim: int, value_dim: int, rows: int) -> int:
    """Return the bytes of scratch memory a worker needs for items of up to `rows` rows."""
    keys, values = (-(-dim // LANES) * LANES for dim in (head_dim, value_dim))
    blocks = -(-rows // ROW_BLOCK) * ROW_BLOCK
    # Queries, results, and results of segments before; K and V of a super-block in bfloat16.
    a_row = STATE_BYTES + SUMS_BYTES + 4 * (keys + 2 * values)
    return ROWS_AT + blocks * a_row + SUB_BLOCKS * 2 * SUB_BLOCK_TOKENS * (keys + values)


def attention_partial_floats(num_heads: int, value_dim: int) -> int:
    """Return the float32 numbers of a partial: what all heads of a token found in a segment."""
    return num_heads * (LANES + -(-value_dim // LANES) * LANES)


PLACES_BYTES: Final = 64


def rope_scratch_bytes(head_dim: int) -> int:
    """Return the bytes of scratch memory a worker needs for `rope_write`."""
    return PLACES_BYTES + 3 * 4 * (-(-head_dim // 16) * 16)
