"""Who writes which block in a step: the check that rows cannot damage one another.

A row writes the KV of its tokens into the blocks of its table. A block may stand in the tables of
several rows (a shared prefix; one of them may be filling it), but only at the same logical place,
and only one row of a step may write it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compute_plane.errors import InvalidBatch
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import Int32Array
from compute_plane.executor.row_stage import LiveRows
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers, ragged_index
from compute_plane.executor.step import Int64Array, TableCopy

NOBODY = -1


class WriteChecker:
    """Keeps two scratch columns over the pool's blocks, so that a check costs no allocation of it.

    `_writer[b]`: the row that writes block b in the step under check. `_place[b]`: at which logical
    index. Both are NOBODY between checks.
    """

    def __init__(self, limits: SlotLimits) -> None:
        self._block_size = limits.block_size
        self._writer = np.full(limits.num_blocks, NOBODY, dtype=np.int64)
        self._place = np.full(limits.num_blocks, NOBODY, dtype=np.int64)

    def check(self, live: LiveRows, staged: SlotNumbers, memory: SlotMemory) -> None:
        """Raise InvalidBatch if a block that is written is not its writer's alone to write."""
        batch, ends, row_of, tables = live.batch, live.ends, live.row_of, memory.tables
        if row_of.size == 0:
            return
        size = self._block_size
        first_places = batch.positions // size
        rows, places = ragged_index(first_places, (ends - 1) // size - first_places + 1)
        lines = staged.line[batch.slots]
        written = tables[lines[rows], places].astype(np.int64)
        self._writer[written] = rows
        self._place[written] = places
        try:
            # Of several writers of one block the last assignment stands, so the others differ.
            clash = (self._writer[written] != rows) | (self._place[written] != places)
            if clash.any():
                index = int(clash.argmax())
                block = int(written[index])
                a, b = sorted((int(row_of[rows[index]]), int(row_of[self._writer[block]])))
                who = f"rows {a} and {b}" if a != b else f"row {a} at two places"
                raise InvalidBatch(
                    f"block {block} would be written by {who}", field="new_block_ids"
                )
            used = _UsedEntries.of(tables, lines, -(-ends // size))
            self._refuse_misplaced(used, row_of)
            for index, copy in enumerate(batch.copies):
                _check_copy(index, copy, batch.slots, used)
        finally:
            self._writer[written] = NOBODY
            self._place[written] = NOBODY

    def _refuse_misplaced(self, used: _UsedEntries, row_of: Int64Array) -> None:
        """Refuse a block that is written and stands at another place of a table."""
        written = np.flatnonzero(self._place[used.blocks] != NOBODY)
        rows, places = used.where(written)
        wrong = np.flatnonzero(self._place[used.blocks[written]] != places)
        if wrong.size:
            first = wrong[0]
            raise InvalidBatch(
                f"block {used.blocks[written[first]]} is entry {places[first]} of the table of row "
                f"{row_of[rows[first]]}, but is written as another part of a sequence",
                field="new_block_ids",
            )


class _UsedEntries(NamedTuple):
    """The entries of the rows' tables that hold tokens, one row behind the other.

    Not as a rectangle: one row may be a hundred times as long as all others. `blocks`: int32 [E].
    `ends`: int64 [S], behind each row's last entry.
    """

    blocks: Int32Array
    ends: Int64Array

    @classmethod
    def of(cls, tables: Int32Array, lines: Int64Array, counts: Int64Array) -> _UsedEntries:
        """Return the first `counts` [S] entries of some lines [S]."""
        rows = zip(lines.tolist(), counts.tolist(), strict=True)
        blocks = np.concatenate([tables[line, :count] for line, count in rows])
        return cls(blocks, np.cumsum(counts))

    def where(self, entries: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the row of each of some entries, and its place in the table."""
        rows = np.searchsorted(self.ends, entries, side="right")
        firsts = np.concatenate([[0], self.ends])
        return rows, entries - firsts[rows]


def _check_copy(index: int, copy: TableCopy, slots: Int64Array, used: _UsedEntries) -> None:
    """Refuse a copy into a block that stands in the table of another slot's row."""
    rows, _ = used.where(np.flatnonzero(used.blocks == copy.destination))
    holders = slots[rows]
    strangers = holders[holders != copy.slot]
    if strangers.size:
        field = f"copies[{index}].destination_block"
        raise InvalidBatch(
            f"{field}: block {copy.destination} is in the table of slot {strangers[0]}",
            field=field,
        )
