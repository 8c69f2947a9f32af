"""What is sent of a step's block tables, that the device has what the step uses of them.

The device's tables stay from step to step. Of an array of which it has something already only the
entries are sent that rows have entered since, each with its place. Of another array, what the rows
use: a rectangle and what sticks out of it (`compute_plane.executor.block_tables`).

    sent behind the columns   │ places │ blocks │ rectangle      │
                                int64 [E] int32 [E] int32 [S, w]
                                   └───┬───┘      │
    the device's tables [R, M]         ▼          ▼              the rest is as it was

Array letters: R rows of all graphs, S of the step, M width of the tables, E entries, w of the
rectangle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from compute_plane.executor.block_tables import FEW_ENTRIES, OUTSIDE_PRICE, rectangle_width
from compute_plane.executor.slot_state import ragged_index

Array = npt.NDArray[Any]


class KnownTables(NamedTuple):
    """An array that nobody can write, and how many entries of each row the device has at least."""

    array: Array
    used: Array


class TableUpdate(NamedTuple):
    """Entries [E] and the rectangle [rows, width]; `parts`: as they are sent."""

    parts: list[Array]
    num_entries: int
    rows: int
    width: int


def update_tables(
    known: KnownTables | None, tables: Array, used: Array, row_entries: int
) -> TableUpdate | None:
    """Return what is to be sent for a step; None: nothing. It is at most all of `tables`.

    `used`: [S], entries of each row that the step uses. `row_entries`: M.
    """
    longest = int(used.max())
    if known is not None and known.array is tables:
        most = 0 if known.used.tobytes() == used.tobytes() else int((used - known.used).max())
        if most <= 0:
            return None
        # There is room for all of the tables, which short ones may be less than an entry a row.
        if most == 1 and longest >= OUTSIDE_PRICE and len(used) * longest > FEW_ENTRIES:
            return _update(tables, 0, known.used, used, row_entries)
    width = rectangle_width(used)
    if width == longest:
        return TableUpdate([tables[:, :width]], 0, len(used), width)
    return _update(tables, width, np.full_like(used, width), used, row_entries)


def known_after(tables: Array, used: Array) -> KnownTables | None:
    """Return what the device has once such an update is there."""
    # What can still be written may be another one next time.
    return None if tables.flags.writeable else KnownTables(tables, used)


class TableColumns:
    """Block tables of a step that no graph holds: as columns, and put together on the device.

    There every kind of rows has tables of its own, as wide as its longest row. Where most of that
    means nothing, it is sent as above, to be put in place in memory that nothing is sent to.

    `rooms`: shapes of that memory, by the tables' name.
    """

    def __init__(self, tables: Array) -> None:
        self._tables = tables
        self.rooms: dict[str, tuple[int, ...]] = {}

    def columns(self, name: str, rows: Array, used: Array) -> dict[str, Array]:
        """Return what is sent of some rows [S] of the tables, of the first `used` [S] entries."""
        longest, width = int(used.max(initial=0)), rectangle_width(used)
        outside = int(np.maximum(used - width, 0).sum())
        taken = len(rows) * width + OUTSIDE_PRICE * outside
        # So that memory for both is half as much again as that for the tables alone, at most.
        if width == longest or 2 * taken > len(rows) * longest:
            return {name: self._tables[rows, :longest]}
        self.rooms[name] = len(rows), longest
        at, places = ragged_index(np.full_like(used, width), np.maximum(used - width, 0))
        return {
            f"{name}_rectangle": self._tables[rows, :width],
            f"{name}_places": at * longest + places,
            f"{name}_blocks": self._tables[rows[at], places],
        }

    def put_together(self, name: str, columns: dict[str, Tensor]) -> Tensor:
        """Return the tables, [S, M], from the columns on the device, where that is queued."""
        tables = columns[name]
        if name in self.rooms:
            rectangle = columns[f"{name}_rectangle"]
            tables[:, : rectangle.shape[1]].copy_(rectangle)
            blocks = columns[f"{name}_blocks"]
            tables.view(-1).index_copy_(0, columns[f"{name}_places"], blocks)
        return tables


def _update(tables: Array, width: int, before: Array, used: Array, row_entries: int) -> TableUpdate:
    """Return a rectangle and the entries behind the first `before` of each row, up to `used`."""
    rows = np.flatnonzero(used > before)
    places, counts = before[rows], (used - before)[rows]
    if int(counts.max(initial=1)) > 1:
        items, places = ragged_index(places.astype(np.int64), counts.astype(np.int64))
        rows = rows[items]
    entries = [rows * row_entries + places, tables[rows, places]]
    return TableUpdate([*entries, tables[:, :width]], len(rows), len(tables), width)
