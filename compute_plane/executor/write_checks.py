"""Who writes which block in a step: the check that rows cannot damage one another.

A row writes the KV of its tokens into the blocks of its table. A block may stand in the tables of
several rows (a shared prefix; one of them may be filling it), but only at the same logical place,
and only one row of a step may write it.
"""

from __future__ import annotations

import numpy as np

from compute_plane.errors import InvalidBatch
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import BoolArray, Int32Array
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
            used_places = -(-ends // size)  # [S]
            columns = np.arange(int(used_places.max()))
            used = tables[:, : columns.size][lines]  # [S, M]
            is_used = columns < used_places[:, None]
            place = self._place[used]
            self._refuse_misplaced(is_used & (place != NOBODY) & (place != columns), used, row_of)
            for index, copy in enumerate(batch.copies):
                self._check_copy(index, copy, batch.slots, used, is_used)
        finally:
            self._writer[written] = NOBODY
            self._place[written] = NOBODY

    @staticmethod
    def _refuse_misplaced(wrong: BoolArray, used: Int32Array, row_of: Int64Array) -> None:
        if wrong.any():
            row, column = (int(axis[0]) for axis in np.nonzero(wrong))
            raise InvalidBatch(
                f"block {used[row, column]} is entry {column} of the table of row "
                f"{row_of[row]}, but is written as another part of a sequence",
                field="new_block_ids",
            )

    def _check_copy(
        self,
        index: int,
        copy: TableCopy,
        slots: Int64Array,
        used: Int32Array,
        is_used: BoolArray,
    ) -> None:
        """Refuse a copy into a block that stands in the table of another slot's row."""
        holders = slots[((used == copy.destination) & is_used).any(axis=1)]
        strangers = holders[holders != copy.slot]
        if strangers.size:
            field = f"copies[{index}].destination_block"
            raise InvalidBatch(
                f"{field}: block {copy.destination} is in the table of slot {strangers[0]}",
                field=field,
            )
