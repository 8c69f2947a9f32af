"""What the recorded plane knew before and after each step: tokens, tables, contents of blocks.

It is derived from the recording alone, and is what the replaying plane is led back to where it went
another way. Array letters as on the wire; B is the block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from control_plane.engine.recording_tables import BlockTables, FilledPlace, filled_places
from hetero_infer.replay.recording_reader import RecordingError
from protos.hetero.compute.v1 import compute_pb2


@dataclass(slots=True)
class RecordedSlot:
    """A sequence: how it was started, and all its tokens so far.

    `is_sound`: False once its row failed or its tokens cannot be known; it then waits for a start.
    """

    start: compute_pb2.SlotStart
    tokens: list[int]
    is_sound: bool = True


class RecordedState:
    """The slots of one recorded session."""

    def __init__(self, plane: compute_pb2.DescribeResponse) -> None:
        self.block_size = plane.block_size
        self._max_tokens = plane.limits.max_tokens
        self._slots: dict[int, RecordedSlot] = {}
        self._tables = BlockTables()
        self._digests: dict[int, int] = {}  # block → what it held when it was filled
        self._host_digests: dict[int, int] = {}

    def slot(self, number: int) -> RecordedSlot | None:
        """Return a slot; None if it is not started."""
        return self._slots.get(number)

    def table(self, number: int) -> list[int]:
        """Return the block table of a slot."""
        return self._tables.table(number)

    def known_digests(self, number: int) -> dict[int, int]:
        """Return index in the table → digest, for the blocks of a slot whose content is known."""
        table = enumerate(self.table(number))
        return {i: self._digests[block] for i, block in table if block in self._digests}

    def blocks_at(self, batch: compute_pb2.ExecutionBatch, places: list[FilledPlace]) -> list[int]:
        """Return the blocks at these places of the tables; nothing if a table has none there."""
        return self._tables.blocks_at(batch, places) or []

    def block_tokens(self, number: int, index: int) -> list[int]:
        """Return the tokens whose keys and values are in entry `index` of a slot's table."""
        slot = self.slot(number)
        first = index * self.block_size
        return slot.tokens[first : first + self.block_size] if slot is not None else []

    def apply(self, batch: compute_pb2.ExecutionBatch) -> list[FilledPlace]:
        """Take a batch in; return the places of the blocks it fills.

        Raises RecordingError for columns that do not belong together.
        """
        self._check(batch)
        self._move_digests(batch)
        self._tables.apply(batch)
        released = {number: self._slots.pop(number, None) for number in batch.released}
        for start in batch.starts:
            self._slots[start.slot] = self._started(start, released)
        if batch.token_counts:
            self._append_given(batch)
        for row, number in enumerate(batch.slots):
            table = self.table(number)
            first, end = batch.positions[row], batch.positions[row] + batch.query_lens[row]
            for block in table[first // self.block_size : -(-end // self.block_size)]:
                self._digests.pop(block, None)
        return filled_places(batch, self.block_size)

    def commit(
        self, batch: compute_pb2.ExecutionBatch, output: compute_pb2.ExecutionOutput
    ) -> None:
        """Take in what the recorded plane answered. Raises RecordingError if it does not fit."""
        if len(output.sampled_token_ids) != len(batch.sampled_rows):
            raise self._wrong(batch, "sampled_token_ids")
        kept = kept_drafts(batch, output)
        failed = {failure.row for failure in output.row_failures}
        for row in failed:
            if row < len(batch.slots):
                self._spoil(batch.slots[row])
        for k, (row, number, token) in enumerate(
            zip(batch.sampled_rows, sample_targets(batch), output.sampled_token_ids, strict=True)
        ):
            slot = self.slot(number)
            if row in failed:
                self._spoil(number)
            elif slot is not None and slot.is_sound:
                slot.tokens += [*kept[k], token]
        if len(output.block_digests) == len(batch.digest_blocks):
            self._digests.update(zip(batch.digest_blocks, output.block_digests, strict=True))

    def _started(
        self, start: compute_pb2.SlotStart, released: dict[int, RecordedSlot | None]
    ) -> RecordedSlot:
        """Return a slot as a start makes it; `released`: slots that may still be named."""
        if not start.HasField("prefix"):
            return RecordedSlot(start, list(start.token_ids))
        of, num_tokens = start.prefix.slot, start.prefix.num_tokens
        named = self._slots.get(of, released.get(of))
        if named is None:
            return RecordedSlot(start, list(start.token_ids), is_sound=False)
        return RecordedSlot(start, [*named.tokens[:num_tokens], *start.token_ids], named.is_sound)

    def _spoil(self, number: int) -> None:
        slot = self.slot(number)
        if slot is not None:
            slot.is_sound = False

    def _append_given(self, batch: compute_pb2.ExecutionBatch) -> None:
        first = 0
        for number, count in zip(batch.slots, batch.token_counts, strict=True):
            slot = self.slot(number)
            if slot is not None:
                slot.tokens += batch.token_ids[first : first + count]
            first += count

    def _move_digests(self, batch: compute_pb2.ExecutionBatch) -> None:
        device, host = self._digests, self._host_digests
        for move in batch.swap_out:
            _copy_digest(device, move.source_block, host, move.destination_block)
        for copy in batch.copies:
            _copy_digest(device, copy.source_block, device, copy.destination_block)
        for move in batch.swap_in:
            _copy_digest(host, move.source_block, device, move.destination_block)

    def _check(self, batch: compute_pb2.ExecutionBatch) -> None:
        """Refuse what a control plane cannot have sent and this class could not read."""
        num_rows = len(batch.slots)
        for name in ("query_lens", "positions"):
            if len(getattr(batch, name)) != num_rows:
                raise self._wrong(batch, name)
        for counts, values in (
            ("token_counts", "token_ids"),
            ("new_block_counts", "new_block_ids"),
            ("draft_counts", "draft_ids"),
        ):
            column = getattr(batch, counts)
            if (column and len(column) != num_rows) or sum(column) != len(getattr(batch, values)):
                raise self._wrong(batch, counts)
        if sum(batch.query_lens) > self._max_tokens:
            raise self._wrong(batch, "query_lens")
        if any(row >= num_rows for row in batch.sampled_rows):
            raise self._wrong(batch, "sampled_rows")
        if batch.sampled_slots and len(batch.sampled_slots) != len(batch.sampled_rows):
            raise self._wrong(batch, "sampled_slots")

    @staticmethod
    def _wrong(batch: compute_pb2.ExecutionBatch, field: str) -> RecordingError:
        return RecordingError(
            f"the recording is damaged: {field} of step {batch.step_id} does not fit the batch",
            field="recording",
        )


def sample_targets(batch: compute_pb2.ExecutionBatch) -> list[int]:
    """Return the slot that takes each sample."""
    return list(batch.sampled_slots) or [batch.slots[row] for row in batch.sampled_rows]


def kept_drafts(
    batch: compute_pb2.ExecutionBatch, output: compute_pb2.ExecutionOutput
) -> list[list[int]]:
    """Return the drafts that an answer keeps, of each sample. Counts that do not fit keep none."""
    if len(output.kept_drafts) != len(batch.sampled_rows) or not batch.draft_counts:
        return [[] for _ in batch.sampled_rows]
    firsts = [0, *accumulate(batch.draft_counts)]
    return [
        list(batch.draft_ids[firsts[row] : min(firsts[row] + count, firsts[row + 1])])
        for row, count in zip(batch.sampled_rows, output.kept_drafts, strict=True)
    ]


def _copy_digest(source: dict[int, int], block: int, target: dict[int, int], to: int) -> None:
    digest = source.get(block)
    if digest is None:
        target.pop(to, None)
    else:
        target[to] = digest
