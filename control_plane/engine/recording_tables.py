"""Which blocks a batch fills, and where: for whoever sees the stream of batches and nothing else.

The recorder asks for the digests of these blocks, the replayer says whose they are. Both derive
them from the batches alone, by the same rules as the compute plane's slots.
"""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

from protos.hetero.compute.v1 import compute_pb2


class FilledPlace(NamedTuple):
    """A block that is full once its row has run: number `entry` of the table of row `row`."""

    row: int
    entry: int


def filled_places(batch: compute_pb2.ExecutionBatch, block_size: int) -> list[FilledPlace]:
    """Return the places of the blocks that a batch fills, rows in order.

    Not those of rows with drafts: what is left in a block is known when these are kept or not.
    """
    places = []
    drafts = batch.draft_counts or repeat(0)
    columns = zip(batch.positions, batch.query_lens, drafts, strict=False)
    for row, (position, query_len, num_drafts) in enumerate(columns):
        if num_drafts:
            continue
        first, end = position // block_size, (position + query_len) // block_size
        if first != end:
            places += [FilledPlace(row, entry) for entry in range(first, end)]
    return places


class BlockTables:
    """The block table of each slot, as the batches so far leave it."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def apply(self, batch: compute_pb2.ExecutionBatch) -> None:
        """Take in what a batch changes, in the order of the wire. Slots unknown are passed over."""
        tables = self._tables
        for copy in batch.copies:
            table = tables.get(copy.slot, ())
            if copy.logical_index < len(table):
                tables[copy.slot][copy.logical_index] = copy.destination_block
        released = {slot: tables.pop(slot, []) for slot in batch.released}
        for start in batch.starts:
            of = start.prefix.slot  # a slot that is released here may still be named
            begun = tables.get(of, released.get(of, []))[: start.prefix.num_blocks]
            tables[start.slot] = [*begun, *start.block_ids]
        if batch.new_block_ids:
            first = 0
            for slot, count in zip(batch.slots, batch.new_block_counts, strict=True):
                if count:
                    new = batch.new_block_ids[first : first + count]
                    tables.setdefault(slot, []).extend(new)
                    first += count

    def table(self, slot: int) -> list[int]:
        """Return the blocks of a slot, in order; empty for one unknown."""
        return self._tables.get(slot, [])

    def blocks_at(
        self, batch: compute_pb2.ExecutionBatch, places: list[FilledPlace]
    ) -> list[int] | None:
        """Return the ids of the blocks at these places; None if a table is too short for one."""
        blocks = []
        for row, entry in places:
            table = self.table(batch.slots[row])
            if entry >= len(table):
                return None
            blocks.append(table[entry])
        return blocks
