"""The tile list of prefill attention: which query tokens a block of threads attends with.

A batch has ragged rows of query tokens. Each row is cut into *tiles* of `tile_tokens` tokens, the
last of a row maybe shorter, and a launch has one block of threads for each entry of a list of
tiles:

    row 0   ████████ ████                     entry     0   1   2   3   4   5   6   7
    row 1   ██                                row       3   0   0   3   1  -1  -1  -1
    row 2   (none: it only decodes)           token     8   8   0   0   0   0   0   0
    row 3   ████████ ████████

The tile with the most keys to read comes first and the shortest last, so that no long one is left
running alone at the end. (By all keys before it: layers with a window share the list.) Entries of
row -1 do nothing: the list may be longer than the tiles are many, so that a graph captured for one
length serves every batch that fits. No bit of the output depends on the list's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import cuda, int32

from kernels.cuda.errors import CudaKernelError
from kernels.cuda.variant import Pointer, Scalar, Scalars

Int32Array: TypeAlias = npt.NDArray[np.int32]

NO_ROW = -1  # of an entry that does nothing


class TileListFullError(CudaKernelError):
    """A batch has more tiles than the list has room for."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"the batch needs {needed} tiles, the list has room for {capacity}")
        self.needed = needed
        self.capacity = capacity


@dataclass(frozen=True, slots=True)
class TileList:
    """`rows` and `tokens`: int32 [capacity], the tile's row and its first query token in the row.

    The first `num_tiles` entries are tiles, the others have row -1.
    """

    rows: Int32Array
    tokens: Int32Array
    num_tiles: int


def plan_tiles(
    query_lens: Sequence[int] | npt.NDArray[Any],
    seq_lens: Sequence[int] | npt.NDArray[Any],
    tile_tokens: int,
    *,
    capacity: int | None = None,
) -> TileList:
    """Return the tiles of a batch, longest first.

    `query_lens` [S]: the rows' query tokens, maybe none, which are the last of their `seq_lens` [S]
    tokens. Tiles with as many keys keep the order of their rows and tokens. Without `capacity` the
    list has no other entries. Raises TileListFullError, or ValueError for a row with more query
    tokens than tokens.
    """
    queries = np.asarray(query_lens, np.int64)
    lengths = np.asarray(seq_lens, np.int64)
    wrong = np.flatnonzero((queries < 0) | (queries > lengths))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"query_lens[{row}] must be between 0 and seq_lens[{row}] = {lengths[row]}, "
            f"got {queries[row]}"
        )
    tiles_of_row = -(-queries // tile_tokens)
    num_tiles = int(tiles_of_row.sum())
    if capacity is None:
        capacity = num_tiles
    if num_tiles > capacity:
        raise TileListFullError(num_tiles, capacity)

    rows = np.repeat(np.arange(len(queries)), tiles_of_row)
    first_tile = np.cumsum(tiles_of_row) - tiles_of_row
    tokens = (np.arange(num_tiles) - first_tile[rows]) * tile_tokens
    # The tile's last token sees all keys up to itself.
    num_keys = (lengths - queries)[rows] + np.minimum(tokens + tile_tokens, queries[rows])
    order = np.argsort(-num_keys, kind="stable")

    entries = np.zeros((2, capacity), np.int32)
    entries[0] = NO_ROW
    entries[0, :num_tiles] = rows[order]
    entries[1, :num_tiles] = tokens[order]
    return TileList(entries[0], entries[1], num_tiles)


def most_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Return the most tiles that a batch of so many query tokens in so many rows can need.

    A row of n tokens has at most (n - 1) // tile_tokens + 1 tiles; in the worst case every row but
    one has a single token.
    """
    rows = min(num_rows, num_tokens)
    return rows + (num_tokens - rows) // tile_tokens


@cuda.jit(device=True, inline="always")
def find_tile(
    row: Scalar, first_token: Scalar, most: Scalar, seq_lens: Pointer, cu_query_lens: Pointer
) -> Scalars:
    """Return, in a kernel, (tokens of the row, its first query token, tokens before that, end).

    The tile is of row `row`, begins at `first_token` of its query tokens and has up to `most`; end
    is behind its last, counted like `first_token`. The row's first query token is counted in the
    batch.
    """
    seq_len, first_query = seq_lens[row], cu_query_lens[row]
    query_len = int32(cu_query_lens[row + 1] - first_query)
    context = int32(seq_len - query_len)
    return seq_len, first_query, context, int32(min(first_token + most, query_len))


@cuda.jit(device=True, inline="always")
def keys_seen(
    first_place: Scalar, places: Scalar, group: Scalar, context: Scalar, end_token: Scalar
) -> Scalars:
    """Return, in a kernel, (position of a warp's first token, how many keys the warp sees).

    The warp has `places` places from `first_place` on, each a token and one of `group` heads. Keys
    up to its last token's own are seen, none where it has no token.
    """
    first_token = int32(first_place // group)
    last_token = min(int32(first_place + places - 1) // group, end_token - 1)
    num_keys = int32(context + last_token + 1)
    return int32(context + first_token), num_keys if first_token < end_token else int32(0)
