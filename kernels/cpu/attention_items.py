"""Cutting the tokens of a piece into attention items (`kernels.cpu.operands.Item`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.cpu.attention_sizes import ROW_BLOCK, SEGMENT, SUB_BLOCKS
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS
from kernels.interface import Int32Array

ITEM_ROWS: Final = 3 * ROW_BLOCK
"""Rows of an item of prefill, about: the more, the more often K and V are used once they are in the
cache; the fewer, the more threads can share a prompt."""
WORK_A_THREAD: Final = 4
"""Pieces of work a thread should find, at least: with fewer, long contexts are shared."""
SHARED_ITEMS: Final = 256
"""Items of a piece in which contexts are shared, at most: so many partials need room. More where a
single context may have more segments (`most_shared_items`)."""

NO_MERGES: Final = np.zeros((0, 4), np.int32)
NO_MERGES.flags.writeable = False


def tokens_per_item(group: int) -> int:
    """Return the most tokens an item should have where `group` query heads share a kv head."""
    return max(1, ITEM_ROWS // group)


def rows_per_item(group: int) -> int:
    """Return the rows of the largest item, for `attention_scratch_bytes`."""
    return group * tokens_per_item(group)


def most_shared_items(context_length: int, block_size: int) -> int:
    """Return the most items of a piece in which contexts are shared: those of two of the longest.

    `context_length`: tokens of the longest sequence.
    """
    longest = num_segments(np.array([context_length - 1]), block_size)
    return max(SHARED_ITEMS, 2 * int(longest[0]))


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


@dataclass(frozen=True, slots=True)
class ContextSharing:
    """What decides whether threads share contexts: `num_threads` of them, and what they share.

    `most_items`: of a piece, once contexts are shared.
    """

    block_size: int
    num_kv_heads: int
    num_threads: int
    most_items: int = SHARED_ITEMS


def share_long_contexts(
    items: Int32Array, positions: Int32Array, sharing: ContextSharing
) -> tuple[Int32Array, Int32Array]:
    """Return items [I', 4] and merges [R, 4] in which threads share contexts, if that helps.

    Where there is little work, an item of one token with several segments becomes an item for each
    segment, and a merge (`kernels.cpu.operands.Merge`), the longest first, as long as there is
    room. The bits of the result are the same. `positions`: [T] of the piece.
    """
    block_size, num_threads = sharing.block_size, sharing.num_threads
    if len(items) * sharing.num_kv_heads >= WORK_A_THREAD * num_threads or num_threads == 1:
        return items, NO_MERGES
    if positions.max() < shortest_shared(block_size):
        return items, NO_MERGES
    segments = np.where(items[:, 1] == 1, num_segments(positions[items[:, 0]], block_size), 1)
    longest_first = np.argsort(-segments, kind="stable")
    num_items = len(items) + np.cumsum(segments[longest_first] - 1)
    segments[longest_first[num_items > sharing.most_items]] = 1
    ends = np.cumsum(segments)
    if ends[-1] == len(items):
        return items, NO_MERGES
    shared = np.repeat(items, segments, axis=0)
    firsts = ends - segments
    is_split = segments > 1
    numbers = np.arange(1, len(shared) + 1, dtype=np.int32) - np.repeat(firsts, segments)
    shared[:, 3] = np.where(np.repeat(is_split, segments), numbers, 0)
    merges = np.zeros((int(is_split.sum()), 4), np.int32)
    merges[:, 0] = items[is_split, 0]
    merges[:, 1] = firsts[is_split]
    merges[:, 2] = segments[is_split]
    return shared, merges


def shortest_shared(block_size: int) -> int:
    """Return a position before which no context has two segments."""
    return SEGMENT * SUB_BLOCKS // -(-block_size // SUB_BLOCK_TOKENS) * block_size


def num_segments(positions: Int32Array, block_size: int) -> Int32Array:
    """Return the segments of the contexts that end at these positions."""
    sub_blocks = -(-block_size // SUB_BLOCK_TOKENS)
    last = positions // block_size * sub_blocks + positions % block_size // SUB_BLOCK_TOKENS
    return (last // (SEGMENT * SUB_BLOCKS) + 1).astype(np.int32)
