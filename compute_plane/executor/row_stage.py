"""Taking a batch's rows into the staged slots: given tokens, new blocks, continuity, samples.

Only rows of sound slots are taken in; rows of poisoned slots are left out and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from compute_plane.errors import InvalidBatch
from compute_plane.executor.batch_checks import SlotLimits, refuse_where
from compute_plane.executor.constraints import sample_masks
from compute_plane.executor.interface import BoolArray
from compute_plane.executor.sampling_rows import SamplingRows
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers, ragged_index
from compute_plane.executor.step import EMPTY, Int64Array, StepBatch


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a batch that can run, S of them with K samples.

    `batch`: its columns, of these rows only. `row_of` [S], `sample_of` [K]: their numbers in the
    batch as sent. `ends` [S]: tokens of each row's sequence once it is computed. `targets` [K]: the
    slot that takes each sample. `poisoned_rows`: the rows left out, by their number as sent.
    """

    batch: StepBatch
    row_of: Int64Array
    sample_of: Int64Array
    ends: Int64Array
    targets: Int64Array
    poisoned_rows: Int64Array

    def refuse_rows(self, wrong: BoolArray, field: str, message: Callable[[int], str]) -> None:
        """Raise InvalidBatch for the first row i that is wrong, under its number as sent."""
        if wrong.any():
            row = int(wrong.argmax())
            name = f"{field}[{self.row_of[row]}]"
            raise InvalidBatch(f"{name} {message(row)}", field=name)


def live_rows(batch: StepBatch, staged: SlotNumbers) -> LiveRows:
    """Return the rows whose slots are sound; poison the slots that miss a sample by the others.

    Raises InvalidBatch for a slot that is not started.
    """
    slots = batch.slots
    refuse_where(~staged.is_known[slots], "slots", lambda i: f"{slots[i]} is not started")
    targets = batch.sampled_slots if batch.sampled_slots.size else slots[batch.sampled_rows]
    refuse_where(
        ~staged.is_known[targets], "sampled_slots", lambda i: f"{targets[i]} is not started"
    )
    is_live = ~staged.is_poisoned[slots]
    if is_live.all():
        row_of, sample_of = np.arange(slots.size), np.arange(targets.size)
        return LiveRows(
            batch, row_of, sample_of, batch.positions + batch.query_lens, targets, EMPTY
        )
    sample_of = np.flatnonzero(is_live[batch.sampled_rows])
    staged.is_poisoned[np.delete(targets, sample_of)] = True
    live = _without_dead(batch, is_live, sample_of)
    return LiveRows(
        live,
        np.flatnonzero(is_live),
        sample_of,
        live.positions + live.query_lens,
        targets[sample_of],
        np.flatnonzero(~is_live),
    )


def _without_dead(batch: StepBatch, is_live: BoolArray, sample_of: Int64Array) -> StepBatch:
    """Return the columns of the live rows and of their samples."""
    new_row = np.cumsum(is_live) - 1

    def ragged(counts: Int64Array, values: Int64Array) -> tuple[Int64Array, Int64Array]:
        if counts.size == 0:
            return EMPTY, EMPTY
        return counts[is_live], values[np.repeat(is_live, counts)]

    token_counts, token_ids = ragged(batch.token_counts, batch.token_ids)
    new_block_counts, new_block_ids = ragged(batch.new_block_counts, batch.new_block_ids)
    draft_counts, draft_ids = ragged(batch.draft_counts, batch.draft_ids)
    return replace(
        batch,
        slots=batch.slots[is_live],
        query_lens=batch.query_lens[is_live],
        positions=batch.positions[is_live],
        token_counts=token_counts,
        token_ids=token_ids,
        new_block_counts=new_block_counts,
        new_block_ids=new_block_ids,
        draft_counts=draft_counts,
        draft_ids=draft_ids,
        sampled_rows=new_row[batch.sampled_rows[sample_of]],
        prompt_logprobs=[
            replace(request, row=int(new_row[request.row]))
            for request in batch.prompt_logprobs
            if is_live[request.row]
        ],
        constraints=[
            replace(constraint, row=int(new_row[constraint.row]))
            for constraint in batch.constraints
            if is_live[constraint.row]
        ],
        embeddings=[
            want._replace(row=int(new_row[want.row]))
            for want in batch.embeddings
            if is_live[want.row]
        ],
    )


def append_given_tokens(
    live: LiveRows, staged: SlotNumbers, memory: SlotMemory, limits: SlotLimits
) -> None:
    """Append the tokens that travel with the rows."""
    batch = live.batch
    if batch.token_ids.size == 0:
        return
    slots, counts = batch.slots, batch.token_counts
    firsts = staged.num_tokens[slots]
    most = limits.max_sequence_tokens
    live.refuse_rows(
        firsts + counts > most,
        "token_counts",
        lambda i: (
            f"({counts[i]}) would give slot {slots[i]} more than {most} tokens, "
            f"it knows {firsts[i]}"
        ),
    )
    rows, places = ragged_index(firsts, counts)
    memory.tokens[staged.line[slots[rows]], places] = batch.token_ids
    staged.num_tokens[slots] += counts
    gained = slots[counts > 0]
    staged.num_given[gained] = staged.num_tokens[gained]


def append_blocks(
    live: LiveRows, staged: SlotNumbers, memory: SlotMemory, limits: SlotLimits
) -> None:
    """Append the rows' new blocks to the tables of their slots."""
    batch = live.batch
    if batch.new_block_ids.size == 0:
        return
    slots, counts = batch.slots, batch.new_block_counts
    firsts = staged.num_blocks[slots]
    most = limits.max_table_len
    live.refuse_rows(
        firsts + counts > most,
        "new_block_counts",
        lambda i: (
            f"({counts[i]}) would give slot {slots[i]} more than {most} blocks, "
            f"it holds {firsts[i]}"
        ),
    )
    rows, places = ragged_index(firsts, counts)
    memory.tables[staged.line[slots[rows]], places] = batch.new_block_ids
    staged.num_blocks[slots] += counts


def check_continuity(live: LiveRows, staged: SlotNumbers, limits: SlotLimits) -> None:
    """Check that rows go on where their slots stand, over known tokens, in blocks they hold."""
    batch, ends = live.batch, live.ends
    slots = batch.slots
    computed, known = staged.num_computed[slots], staged.num_tokens[slots]
    live.refuse_rows(
        ~staged.is_fresh[slots] & (batch.positions != computed),
        "positions",
        lambda i: (
            f"must be the number of tokens computed in slot {slots[i]} ({computed[i]}), "
            f"got {batch.positions[i]}"
        ),
    )
    live.refuse_rows(
        ends > known,
        "query_lens",
        lambda i: f"makes {ends[i]} computed tokens, but slot {slots[i]} knows {known[i]}",
    )
    held = staged.num_blocks[slots]
    live.refuse_rows(
        ends > held * limits.block_size,
        "new_block_counts",
        lambda i: (
            f"leaves slot {slots[i]} with {held[i]} blocks of {limits.block_size} tokens, "
            f"but the row ends after {ends[i]} tokens"
        ),
    )


def advance_states(live: LiveRows, sent: StepBatch, staged: SlotNumbers) -> None:
    """Check that the rows' states are of the tokens before them, and count those of the rows.

    Also of those left out: who copies the state of a failed row, not knowing yet, is to fail alone.
    """
    slots, positions = live.batch.slots, live.batch.positions
    held = staged.state_tokens[slots]
    live.refuse_rows(
        (positions > 0) & (positions != held),
        "positions",
        lambda i: (
            f"must be 0 or the number of tokens in the state of slot {slots[i]} ({held[i]}), "
            f"got {positions[i]}"
        ),
    )
    staged.state_tokens[sent.slots] = sent.positions + sent.query_lens


def check_samples(
    live: LiveRows, staged: SlotNumbers, memory: SlotMemory, limits: SlotLimits
) -> None:
    """Check that sampled rows end at the last known token, and foreign targets are their twins.

    A target that is not the row's own slot then counts as computed as far as the row.
    """
    rows = live.batch.sampled_rows
    sources = live.batch.slots[rows]
    ends, known = live.ends[rows], staged.num_tokens[sources]
    unfinished = ends != known
    if unfinished.any():
        k = int(unfinished.argmax())
        field = f"sampled_rows[{live.sample_of[k]}]"
        raise InvalidBatch(
            f"{field} is sampled after {ends[k]} tokens, but its slot {sources[k]} knows "
            f"{known[k]}",
            field=field,
        )
    for k in np.flatnonzero(live.targets != sources).tolist():
        source, target, end = int(sources[k]), int(live.targets[k]), int(ends[k])
        if staged.is_poisoned[target]:
            continue
        field = f"sampled_slots[{live.sample_of[k]}]"
        if target in live.batch.slots:
            raise InvalidBatch(f"{field}: slot {target} has a row of its own", field=field)
        if staged.num_tokens[target] != end:
            raise InvalidBatch(
                f"{field}: slot {target} knows {staged.num_tokens[target]} tokens, the sampled "
                f"row ends after {end}",
                field=field,
            )
        num_blocks = -(-end // limits.block_size)
        tables = memory.tables[staged.line[[source, target]], :num_blocks]
        if staged.num_blocks[target] < num_blocks or (tables[0] != tables[1]).any():
            raise InvalidBatch(
                f"{field}: the table of slot {target} must begin with the {num_blocks} blocks "
                f"of slot {source}",
                field=field,
            )
        staged.num_computed[target] = end
        staged.is_fresh[target] = False


def sampling_rows(memory: SlotMemory, staged: SlotNumbers, live: LiveRows) -> SamplingRows:
    """Return how each sample is drawn, [K], by the parameters of the slot that takes it."""
    lines = staged.line[live.targets]
    keys = memory.keys_of(lines)
    histories = None
    if keys.have_penalties:
        histories = (memory.tokens, lines.tolist(), staged.num_prompt[live.targets].tolist())
    ends = live.ends[live.batch.sampled_rows]
    return SamplingRows(keys, ends, histories, sample_masks(live.batch))
