"""Block tables of a step: rows of very different lengths in one array.

    row 0   │ ███   │░
    row 1   │ ██████│███████████████████ ░   a text of 131 000 tokens among short ones
    row 2   │ ██    │░
              width

To copy, check or send such an array whole costs rows times the longest. So a rectangle that most
rows lie in is taken whole, and of the few longer ones just what they use. What no row uses is left
as it was found in memory: it means nothing.

An array that nobody can write is the same thing to all who see it in several steps: entries that
one of these steps uses are never changed. Those behind them (░) may be filled in for later steps.

Array letters: S rows, M table width.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.executor.interface import Int32Array
from compute_plane.executor.step import Int64Array

Array = npt.NDArray[Any]

SPARE_ENTRIES: Final = 32
"""Behind the longest row, so that its table can grow in place for some hundred steps."""
OUTSIDE_PRICE: Final = 3
"""What an entry outside of the rectangle costs in entries inside: it is sent with its place."""
FEW_ENTRIES: Final = 16384
"""Up to so many, to take them all costs less than to find out which of them are needed."""

CHEAP_ENTRIES: Final = 1 << 18
"""The same of a look at them."""


def rectangle_width(used: Int64Array | Int32Array) -> int:
    """Return how wide the rectangle is; `used`: [S], entries of each row.

    At most one row in `OUTSIDE_PRICE` sticks out, which makes it the cheapest there is.
    """
    longest, num_rows = int(used.max(initial=0)), len(used)
    if num_rows * longest <= FEW_ENTRIES:
        return longest
    rank = num_rows - 1 - num_rows // OUTSIDE_PRICE
    width = int(np.partition(used, rank)[rank])
    outside = int(np.maximum(used - width, 0).sum(dtype=np.int64))
    saved = num_rows * (longest - width) - OUTSIDE_PRICE * outside
    return width if saved > FEW_ENTRIES else longest


def gather_tables(tables: Int32Array, lines: Int64Array, used: Int64Array) -> Int32Array:
    """Return the first `used` [S] entries of some lines of `tables`, with room to grow in place.

    Nobody can write it. int32 [S, M].
    """
    width, longest = rectangle_width(used), int(used.max(initial=0))
    capacity = min(longest + SPARE_ENTRIES, tables.shape[1])
    found: Int32Array
    if width == longest:
        found = tables[:, :capacity][lines]
    else:
        found = np.empty((len(lines), capacity), dtype=np.int32)
        found[:, :width] = tables[:, :width][lines]
        for row in np.flatnonzero(used > width).tolist():
            found[row, width : used[row]] = tables[lines[row], width : used[row]]
    found.flags.writeable = False
    return found


def grow(tables: Int32Array, rows: Int64Array, places: Int64Array, blocks: Int64Array) -> None:
    """Fill in entries of gathered tables that no step has used so far."""
    tables.flags.writeable = True
    tables[rows, places] = blocks
    tables.flags.writeable = False


def used_entries(tables: Array, used: Int64Array | Int32Array) -> Array:
    """Return the first `used` [S] entries of the rows, one row behind the other."""
    rows = zip(tables, used.tolist(), strict=True)
    return np.concatenate([table[:count] for table, count in rows])


def are_blocks(tables: Int32Array, used: Int64Array | Int32Array, num_blocks: int) -> bool:
    """Whether the first `used` [S] entries of the rows are blocks of the pool."""
    unsigned = tables.view(np.uint32)  # a negative number is too large
    # Mostly those that mean nothing are in range as well, and to look at some more is cheap.
    if tables.size <= CHEAP_ENTRIES and int(unsigned.max(initial=0)) < num_blocks:
        return True
    return int(used_entries(unsigned, used).max(initial=0)) < num_blocks
