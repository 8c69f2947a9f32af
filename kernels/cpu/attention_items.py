"""Cutting the tokens of a piece into attention items (`kernels.cpu.operands.Item`)."""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.cpu.attention_sizes import ROW_BLOCK
from kernels.interface import Int32Array

ITEM_ROWS: Final = 3 * ROW_BLOCK
"""Rows of an item of prefill, about: the more, the more often K and V are used once they are in the
cache; the fewer, the more threads can share a prompt."""


def tokens_per_item(group: int) -> int:
    """Return the most tokens an item should have where `group` query heads share a kv head."""
    return max(1, ITEM_ROWS // group)


def rows_per_item(group: int) -> int:
    """Return the rows of the largest item, for `attention_scratch_bytes`."""
    return group * tokens_per_item(group)


def attention_items(query_lens: Int32Array, group: int) -> Int32Array:
    """Return the items of a piece, int32 [I, 4], in the order of its tokens.

    `query_lens`: [S], tokens of each row in this piece, 0 or more; row s of the block tables
    belongs to them. A row's tokens have ascending positions.
    """
    num_rows = len(query_lens)
    if (query_lens == 1).all():  # decode
        items = np.zeros((num_rows, 4), np.int32)
        items[:, 0] = items[:, 2] = np.arange(num_rows, dtype=np.int32)
        items[:, 1] = 1
        return items
    most = tokens_per_item(group)
    counts = -(-query_lens // most)
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), counts)
    within = np.arange(len(rows), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.zeros((len(rows), 4), np.int32)
    items[:, 0] = (np.cumsum(query_lens) - query_lens)[rows] + within * most
    items[:, 1] = np.minimum(most, query_lens[rows] - within * most)
    items[:, 2] = rows
    return items
