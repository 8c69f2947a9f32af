"""Drafts: guesses at what follows a row's token, computed with it, kept as far as they are right.

A row with drafts is run as rows of one token each, over one block table. All keys and values of a
layer are written before any are read, so each sees what the ones before it write, and gives the
logits it would give alone:

    sent   │ row 3: token, draft a, draft b
    run    │ rows 3, 4, 5 of one token each: samples x, y, z
    kept   │ x = a but y ≠ b: a is kept, y follows it; z and the KV of b mean nothing

Executors know nothing of it. The drafts lie behind the known tokens of their slot's line, where
penalties find them in the history of those that come after.

Array letters: S rows and K samples as sent, S' and K' as run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from compute_plane.errors import InvalidBatch, UnsupportedBatch
from compute_plane.executor.batch_checks import SlotLimits, refuse_where
from compute_plane.executor.interface import (
    BoolArray,
    ExecutionBatch,
    ExecutionOutput,
    SampleLogprobs,
)
from compute_plane.executor.row_stage import LiveRows
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers, ragged_index
from compute_plane.executor.step import EMPTY, Int64Array, RowConstraint, StepBatch


def check_drafts(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch or UnsupportedBatch for drafts that are wrong by themselves, or wanted."""
    if batch.wanted_drafts.size:
        check_wanted_drafts(batch, limits)
    counts = batch.draft_counts
    if batch.draft_ids.size == 0:
        return
    refuse_where(
        (counts > 0) & (batch.query_lens != counts + 1),
        "draft_counts",
        lambda i: f"({counts[i]}) must be one less than query_lens ({batch.query_lens[i]})",
    )
    num_run = batch.slots.size + batch.draft_ids.size
    if num_run > limits.max_rows:
        raise InvalidBatch(
            f"draft_ids makes {num_run} rows with those of the batch, there are at most "
            f"{limits.max_rows}",
            field="draft_ids",
        )
    num_samples = np.bincount(batch.sampled_rows, minlength=batch.slots.size)
    refuse_where(
        (counts > 0) & (num_samples != 1),
        "draft_counts",
        lambda i: f"({counts[i]}) needs a row with one sample, it has {num_samples[i]}",
    )
    for index, request in enumerate(batch.prompt_logprobs):
        if counts[request.row]:
            raise InvalidBatch(
                f"prompt_logprobs[{index}].row has drafts, which are no prompt",
                field=f"prompt_logprobs[{index}].row",
            )


def check_wanted_drafts(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch for drafts that cannot be wanted, UnsupportedBatch without a model."""
    wanted, rows = batch.wanted_drafts, batch.slots
    if not limits.has_draft_model:
        raise UnsupportedBatch(
            "wanted_drafts: this plane has no draft model", field="wanted_drafts"
        )
    if wanted.size != rows.size:
        raise InvalidBatch(
            f"wanted_drafts must have an entry for each of {rows.size} rows, it has {wanted.size}",
            field="wanted_drafts",
        )
    targets = batch.sampled_slots if batch.sampled_slots.size else rows[batch.sampled_rows]
    num_samples = np.bincount(batch.sampled_rows, minlength=rows.size)
    num_own = np.bincount(
        batch.sampled_rows[targets == rows[batch.sampled_rows]], minlength=rows.size
    )
    refuse_where(
        (wanted > 0) & ((num_samples != 1) | (num_own != 1)),
        "wanted_drafts",
        lambda i: f"({wanted[i]}) needs a row with one sample, for its own slot",
    )


def lay_drafts(live: LiveRows, staged: SlotNumbers, memory: SlotMemory, limits: SlotLimits) -> None:
    """Put the drafts behind the tokens of their slots, and count them until `take_back`."""
    batch = live.batch
    slots, counts = batch.slots, batch.draft_counts
    firsts = staged.num_tokens[slots]
    most = limits.max_sequence_tokens
    live.refuse_rows(
        firsts + counts > most,
        "draft_counts",
        lambda i: (
            f"({counts[i]}) would give slot {slots[i]} more than {most} tokens, "
            f"it knows {firsts[i]}"
        ),
    )
    drafted = counts[batch.sampled_rows] > 0
    wrong = drafted & (live.targets != slots[batch.sampled_rows])
    if wrong.any():
        k = int(live.sample_of[int(wrong.argmax())])
        raise InvalidBatch(
            f"sampled_slots[{k}] must be the slot of its row, which has drafts",
            field=f"sampled_slots[{k}]",
        )
    rows, places = ragged_index(firsts, counts)
    memory.tokens[staged.line[slots[rows]], places] = batch.draft_ids
    staged.num_tokens[slots] += counts


def take_back(live: LiveRows, staged: SlotNumbers) -> None:
    """Count drafts no more: neither as known nor, which comes before this, as computed."""
    slots, counts = live.batch.slots, live.batch.draft_counts
    staged.num_tokens[slots] -= counts
    staged.num_computed[slots] -= counts


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step with drafts.

    `sent`, `run`: its rows. `first_rows` [S], `first_samples` [K]: those of the row's own token, in
    `run`.
    """

    sent: LiveRows
    run: LiveRows
    first_rows: Int64Array
    first_samples: Int64Array

    @classmethod
    def spread(cls, sent: LiveRows) -> DraftedStep:
        """Make a row of each draft."""
        batch = sent.batch
        counts = batch.draft_counts
        num_rows = counts + 1  # [S]
        first_rows = np.cumsum(num_rows) - num_rows
        rows, offsets = ragged_index(np.zeros_like(counts), num_rows)  # [S'] each
        num_samples = num_rows[batch.sampled_rows]  # [K]
        samples, sample_offsets = ragged_index(np.zeros_like(num_samples), num_samples)  # [K']
        positions = batch.positions[rows] + offsets
        query_lens = np.where(counts[rows] > 0, 1, batch.query_lens[rows])
        run = LiveRows(
            replace(
                batch,
                slots=batch.slots[rows],
                query_lens=query_lens,
                positions=positions,
                token_counts=EMPTY,
                token_ids=EMPTY,
                new_block_counts=EMPTY,
                new_block_ids=EMPTY,
                sampled_rows=first_rows[batch.sampled_rows][samples] + sample_offsets,
                prompt_logprobs=[
                    replace(request, row=int(first_rows[request.row]))
                    for request in batch.prompt_logprobs
                ],
                constraints=[
                    RowConstraint(
                        int(first_rows[constraint.row]) + constraint.num_drafts,
                        constraint.allowed_tokens,
                    )
                    for constraint in batch.constraints
                ],
                embeddings=[
                    want._replace(row=int(first_rows[want.row])) for want in batch.embeddings
                ],
            ),
            sent.row_of[rows],
            sent.sample_of[samples],
            positions + query_lens,
            sent.targets[samples],
            sent.poisoned_rows,
        )
        return cls(sent, run, first_rows, np.cumsum(num_samples) - num_samples)

    def kept(self, output: ExecutionOutput, failed: BoolArray) -> Int64Array:
        """Return how many drafts of each sample are kept, [K]. `failed`: rows as run.

        A draft whose row failed is not: computed again, by itself, it fails its request.
        """
        batch = self.sent.batch
        next_tokens = np.asarray(output.next_tokens)
        ends = np.cumsum(batch.draft_counts)
        kept = np.zeros(batch.sampled_rows.size, dtype=np.int64)
        for k in np.flatnonzero(batch.draft_counts[batch.sampled_rows]).tolist():
            row, sample = int(batch.sampled_rows[k]), int(self.first_samples[k])
            count, first_row = int(batch.draft_counts[row]), int(self.first_rows[row])
            drafts = batch.draft_ids[ends[row] - count : ends[row]]
            is_right = next_tokens[sample : sample + count] == drafts
            is_right &= ~failed[first_row : first_row + count]
            is_right &= ~failed[first_row + 1 : first_row + 1 + count]
            kept[k] = count if is_right.all() else int(is_right.argmin())
        return kept

    def as_sent(
        self, batch: ExecutionBatch, output: ExecutionOutput, kept: Int64Array
    ) -> tuple[ExecutionBatch, ExecutionOutput, list[SampleLogprobs]]:
        """Return batch and output in the numbers of the rows as sent, as far as results read them.

        And the log-probabilities of the drafts that are kept.
        """
        chosen = self.first_samples + kept
        number = {int(sample): k for k, sample in enumerate(chosen.tolist())}
        rows = {int(row): index for index, row in enumerate(self.first_rows.tolist())}
        of_drafts = []
        if output.sample_logprobs:
            of = np.searchsorted(self.first_samples, np.arange(len(batch.sampling)), side="right")
            of_drafts = [
                SampleLogprobs(int(of[entry.sample]) - 1, entry.logprob, entry.top)
                for entry in output.sample_logprobs
                if entry.sample < chosen[of[entry.sample] - 1]
            ]
        sent = replace(
            batch,
            sampled_rows=self.sent.batch.sampled_rows.astype(np.int32),
            prompt_logprob_rows=[request.row for request in self.sent.batch.prompt_logprobs],
            embeddings=self.sent.batch.embeddings,
        )
        output = replace(
            output,
            next_tokens=np.asarray(output.next_tokens)[chosen],
            failed_rows={
                rows[row]: message for row, message in output.failed_rows.items() if row in rows
            },
            sample_logprobs=[
                SampleLogprobs(number[entry.sample], entry.logprob, entry.top)
                for entry in output.sample_logprobs
                if entry.sample in number
            ],
        )
        return sent, output, of_drafts
