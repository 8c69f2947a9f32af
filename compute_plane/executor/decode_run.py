"""A step that only goes on where the step before stopped, made from that one.

Most steps of a busy plane are such: the same rows in the same order, each one token further, in the
block it was writing already or in a new one that no row holds. What `SlotTable` checks then depends
on nothing that the step before did not have: slots, limits, the tables and who writes which block.
So the batch is compared with the one that would continue the step before, and only what moves on is
made anew. Everything else takes the ordinary way;
`tests/properties/test_decode_runs_equal_ordinary_steps.py` holds both against each other.

Array letters: T tokens, S rows; here both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.block_tables import gather_tables, grow, used_entries
from compute_plane.executor.drafts import DraftedStep
from compute_plane.executor.interface import BoolArray, ExecutionBatch
from compute_plane.executor.row_stage import LiveRows, sampling_rows
from compute_plane.executor.samples_ahead import SamplesAhead
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers
from compute_plane.executor.step import Int64Array, StepBatch


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A checked batch, ready to run.

    `batch`: None if no row is left to run. `rows`: how its rows and samples are numbered as sent.
    `involved`: every slot that is not to be trusted if the step fails as a whole. `num_samples`:
    samples as sent. `run`: the run of steps that it continues, if it does. `drafted`: with drafts,
    what makes the rows it runs those that were sent; `rows` are as run.
    """

    batch: ExecutionBatch | None
    rows: LiveRows
    involved: Int64Array
    num_samples: int
    run: DecodeRun | None = None
    drafted: DraftedStep | None = None


class DecodeRun:
    """What a step that has run leaves for the steps that continue it.

    `num_left`: steps that may follow before a row reaches the longest sequence. Valid if the step
    before was the latest one and ran without a fault, or is under way without one that is known.
    """

    __slots__ = (
        "_batch", "_block_size", "_columns", "_first", "_held", "_lines", "_next", "_num_blocks",
        "_num_inside", "num_left",
    )  # fmt: skip

    def __init__(self, first: PreparedStep, numbers: SlotNumbers, limits: SlotLimits) -> None:
        sent, ends = first.rows.batch, first.rows.ends
        self._first = first
        self._batch = _shared(first.batch)
        self._lines = numbers.line[sent.slots]
        self._columns = (
            sent.slots.tobytes(),
            sent.query_lens.tobytes(),
            sent.sampled_rows.tobytes(),
        )
        self._block_size, self._num_blocks = limits.block_size, limits.num_blocks
        self._next = ends.tobytes()  # the positions of the step that continues this one
        # Steps in which every row stays in its block.
        self._num_inside = int((-ends % limits.block_size).min())
        self._held: BoolArray | None = None  # [num_blocks], once a row has entered another block
        self.num_left = limits.max_sequence_tokens - int(ends.max())

    @staticmethod
    def begins_with(step: PreparedStep) -> bool:
        """Whether a step that ran without failures may be continued.

        Every row decodes one token and samples the next one for its own slot.
        """
        batch, sent = step.batch, step.rows.batch
        return (
            batch is not None
            and len(batch.input_tokens) == len(sent.slots) == len(sent.sampled_rows)
            and step.num_samples == len(sent.sampled_rows)
            and step.rows.poisoned_rows.size == 0
            and step.drafted is None
            and sent.sampled_slots.size == 0
            and not (
                batch.copies
                or batch.state_copies
                or batch.prompt_logprob_rows
                or batch.digest_blocks
                or batch.embeddings
                or batch.is_prefill.any()
            )
        )

    def is_continued_by(self, batch: StepBatch, numbers: SlotNumbers) -> bool:
        """Whether a batch is the step before again, one token further, and nothing else."""
        return (
            self.num_left > 0
            and batch.positions.tobytes() == self._next
            and (
                batch.slots.tobytes(),
                batch.query_lens.tobytes(),
                batch.sampled_rows.tobytes(),
            )
            == self._columns
            and not (batch.swap_out or batch.swap_in or batch.digest_blocks.size)
            and not (batch.starts or batch.copies or batch.state_copies)
            and not (batch.prompt_logprobs or batch.embeddings or batch.wanted_drafts.size)
            and not (batch.token_counts.size or batch.token_ids.size)
            and not (batch.draft_counts.size or batch.draft_ids.size or batch.constraints)
            and not (batch.sampled_slots.size or batch.released.size)
            and self._grows_by_free_blocks(batch, numbers)
        )

    def _grows_by_free_blocks(self, batch: StepBatch, numbers: SlotNumbers) -> bool:
        """Whether just the rows that enter another block get one each, which no row holds."""
        counts, ids = batch.new_block_counts, batch.new_block_ids
        if self._num_inside > 0:
            return not (counts.size or ids.size)
        if counts.size != len(self._lines):
            return False
        places, offsets = np.divmod(batch.positions, self._block_size)
        enters = offsets == 0
        num_entering = np.count_nonzero(enters)
        if (
            num_entering == 0
            or (counts != enters).any()
            or ids.size != num_entering
            or (numbers.num_blocks[batch.slots[enters]] != places[enters]).any()
            or int(ids.min()) < 0
            or int(ids.max()) >= self._num_blocks
        ):
            return False
        held = self._held_blocks(batch.positions)
        return not held[ids].any() and (num_entering == 1 or len(set(ids.tolist())) == ids.size)

    def _held_blocks(self, positions: Int64Array) -> BoolArray:
        """Return which blocks hold tokens of the rows before these positions, [num_blocks]."""
        if self._held is None:
            num_used = -(-positions // self._block_size)
            self._held = np.zeros(self._num_blocks, dtype=np.bool_)
            self._held[used_entries(self._batch.block_tables, num_used)] = True
        return self._held

    def follow(
        self,
        batch: StepBatch,
        numbers: SlotNumbers,
        memory: SlotMemory,
        ahead: SamplesAhead | None = None,
    ) -> PreparedStep:
        """Take in a batch that continues the run and return it as it is run.

        `ahead`: of the step before, if that is still under way. Nothing can be refused any more, so
        the slots' numbers are changed in place.
        """
        first = self._first
        positions = batch.positions
        ends = positions + 1
        rows = LiveRows(
            batch,
            first.rows.row_of,
            first.rows.sample_of,
            ends,
            first.rows.targets,
            first.rows.poisoned_rows,
        )
        if batch.new_block_ids.size:
            self._enter_blocks(batch, numbers, memory)
        numbers.num_computed[batch.slots] = ends
        if numbers.state_tokens.size:
            numbers.state_tokens[batch.slots] = ends
        whole = replace(
            self._batch,
            input_tokens=memory.tokens[self._lines, positions],
            positions=positions.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            sampling=sampling_rows(memory, numbers, rows),
            input_sources=None if ahead is None else ahead.sources(self._lines, memory),
        )
        self._next = ends.tobytes()
        self._num_inside -= 1
        self.num_left -= 1
        return PreparedStep(whole, rows, first.involved, first.num_samples, self)

    def _enter_blocks(self, batch: StepBatch, numbers: SlotNumbers, memory: SlotMemory) -> None:
        """Append new blocks to the tables of their rows."""
        entering = np.flatnonzero(batch.new_block_counts)
        places = batch.positions[entering] // self._block_size
        memory.tables[self._lines[entering], places] = batch.new_block_ids
        numbers.num_blocks[batch.slots[entering]] += 1
        self._held_blocks(batch.positions)[batch.new_block_ids] = True
        ends = batch.positions + 1
        tables = self._batch.block_tables
        if int(places.max()) < tables.shape[1]:
            # Steps that are under way use none of these entries.
            grow(tables, entering, places, batch.new_block_ids)
        else:
            tables = gather_tables(memory.tables, self._lines, -(-ends // self._block_size))
            self._batch = replace(self._batch, block_tables=tables)
        self._num_inside = int((-ends % self._block_size).min()) + 1  # this step is one of them


def _shared(batch: ExecutionBatch | None) -> ExecutionBatch:
    """Return the first batch of a run; what its steps share, an executor can only read."""
    if batch is None:
        raise ValueError("a step that ran nothing cannot be continued")
    columns = (batch.block_tables, batch.is_prefill, batch.query_lens, batch.sampled_rows)
    for column in (*columns, batch.states, batch.adapters):
        column.flags.writeable = False
    return batch
