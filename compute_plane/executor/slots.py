"""Slots: what the compute plane remembers of each sequence, and batches made whole from it.

The wire carries differences; `SlotTable.prepare` checks a batch against the slots, takes the
difference in, and gives the executor the seed documents' `ExecutionBatch`, complete.
`SlotTable.complete` appends what was sampled; `count_ahead` and `complete_ahead` do it in two steps
for an executor that goes on meanwhile (`compute_plane.executor.samples_ahead`). A batch is checked
whole before anything visible changes; a refused one leaves no trace.

Array letters: T tokens, S rows, K samples, M width of the block tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from compute_plane.errors import BatchRefused
from compute_plane.executor.batch_checks import SlotLimits, check_columns
from compute_plane.executor.block_tables import gather_tables
from compute_plane.executor.copy_stage import ReplacedEntry, StagedCopy, stage_copies
from compute_plane.executor.decode_run import DecodeRun, PreparedStep
from compute_plane.executor.draft_model import KnownText
from compute_plane.executor.drafts import DraftedStep, check_drafts, lay_drafts, take_back
from compute_plane.executor.embeddings import check_embeddings
from compute_plane.executor.interface import (
    NO_ADAPTERS,
    NO_STATES,
    BoolArray,
    ExecutionBatch,
    ExecutionOutput,
    Int32Array,
    StateCopy,
)
from compute_plane.executor.row_stage import (
    LiveRows,
    advance_states,
    append_blocks,
    append_given_tokens,
    check_continuity,
    check_samples,
    live_rows,
    sampling_rows,
)
from compute_plane.executor.samples_ahead import (
    SampleAwaited,
    SamplesAhead,
    check_needs_no_sample,
)
from compute_plane.executor.slot_starts import stage_slots
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers, ragged_index
from compute_plane.executor.step import Int64Array, StepBatch, StepResult
from compute_plane.executor.step_results import (
    check_output,
    nothing_run,
    step_result,
    with_drafts,
    without_dead_rows,
)
from compute_plane.executor.write_checks import WriteChecker

NOT_COPIED: Final = -1
"""Of a state that is of no number of tokens."""


class SlotTable:
    """All slots of the plane. Owned by the device thread."""

    def __init__(self, limits: SlotLimits) -> None:
        self.limits = limits
        self._writes = WriteChecker(limits)
        self.reset()

    def reset(self) -> None:
        """Forget every slot."""
        self._numbers = SlotNumbers.empty(self.limits.max_slots, self.limits.num_states)
        self._memory = SlotMemory(self.limits)
        self._waiting_copies: list[StagedCopy] = []
        self._waiting_state_copies: list[StateCopy] = []
        self._run: DecodeRun | None = None
        self._ahead: list[SamplesAhead] = []  # of the steps under way, the oldest first

    # --- before the step ---

    def prepare(self, batch: StepBatch) -> PreparedStep:
        """Check a batch and take it in. Raises BatchRefused, and then nothing has changed.

        While steps are under way it may raise SampleAwaited as well, and a refusal may be due to
        what is not known of them: they must end, and the batch is prepared again.
        """
        if len(self._ahead) > 1:
            # Only samples of the last one have a name (`ExecutionBatch.input_sources`): rows would
            # compute, and histories count, the 0 in the places of the others.
            raise RuntimeError(
                f"a step is prepared while {len(self._ahead)} are not answered; at most 1 may be"
            )
        run, self._run = self._run, None  # valid again once this step has run without a fault
        if run is not None and run.is_continued_by(batch, self._numbers):
            return run.follow(batch, self._numbers, self._memory, self._last_ahead)
        check_columns(batch, self.limits)
        check_drafts(batch, self.limits)
        staged = self._numbers.copy()
        taken: list[int] = []
        replaced: list[ReplacedEntry] = []
        try:
            copies = [
                *self._waiting_copies,
                *stage_copies(batch, staged, self._memory, replaced),
            ]
            state_copies = [*self._waiting_state_copies, *batch.state_copies]
            for copy in batch.state_copies:
                staged.state_tokens[copy.destination] = staged.state_tokens[copy.source]
            freed = stage_slots(batch, staged, self._memory, self._last_ahead, taken)
            prepared = self._stage_rows(batch, staged, copies, state_copies)
        except (BatchRefused, SampleAwaited):
            for entry in reversed(replaced):
                self._memory.tables[entry.line, entry.place] = entry.block
            self._memory.free_lines.extend(taken)
            raise
        self._memory.free_lines.extend(freed)
        self._numbers = staged
        # A step with nothing to run leaves its copies to the next one. That keeps the order,
        # because copies come before everything else of a step.
        has_run = prepared.batch is not None
        self._waiting_copies = [] if has_run else copies
        self._waiting_state_copies = [] if has_run else state_copies
        return prepared

    def _stage_rows(
        self,
        batch: StepBatch,
        staged: SlotNumbers,
        copies: list[StagedCopy],
        state_copies: list[StateCopy],
    ) -> PreparedStep:
        """Take in the rows and return the step as it is run."""
        memory, limits = self._memory, self.limits
        live = live_rows(batch, staged)
        append_given_tokens(live, staged, memory, limits)
        append_blocks(live, staged, memory, limits)
        has_drafts = live.batch.draft_ids.size > 0
        if has_drafts:
            lay_drafts(live, staged, memory, limits)
        check_continuity(live, staged, limits)
        if limits.num_states:
            advance_states(live, batch, staged)
        self._writes.check(live, staged, memory)
        check_samples(live, staged, memory, limits)
        if self._last_ahead is not None:
            check_needs_no_sample(self._last_ahead, live, staged)
        staged.num_computed[live.batch.slots] = live.ends
        staged.is_fresh[live.batch.slots] = False
        drafted = None
        if has_drafts:
            take_back(live, staged)
            drafted = DraftedStep.spread(live)
            live = drafted.run
        involved = [batch.slots, batch.sampled_slots]
        if copies:
            slots = np.array([copy.slot for copy in copies if copy.slot >= 0], dtype=np.int64)
            # The line of one that is released here may be another slot's when the step fails.
            involved.append(slots[staged.is_known[slots]])
        return PreparedStep(
            batch=(
                self._materialise(live, staged, copies, state_copies) if live.row_of.size else None
            ),
            rows=live,
            involved=np.concatenate(involved),
            num_samples=batch.sampled_rows.size,
            drafted=drafted,
        )

    @property
    def _last_ahead(self) -> SamplesAhead | None:
        """Of the step launched last, if that is under way."""
        return self._ahead[-1] if self._ahead else None

    def _materialise(
        self,
        live: LiveRows,
        staged: SlotNumbers,
        copies: list[StagedCopy],
        state_copies: list[StateCopy],
    ) -> ExecutionBatch:
        """Return the step with all its tokens, positions and block tables."""
        memory, batch, ends = self._memory, live.batch, live.ends
        slots = batch.slots
        lines = staged.line[slots]
        rows, positions = ragged_index(batch.positions, batch.query_lens)  # [T] each
        used = -(-ends // self.limits.block_size)
        prompt_rows = [request.row for request in batch.prompt_logprobs]
        ahead = self._last_ahead
        adapters = staged.adapter[slots]
        return ExecutionBatch(
            input_tokens=memory.tokens[lines[rows], positions],
            positions=positions.astype(np.int32),
            seq_lens=ends.astype(np.int32),
            block_tables=gather_tables(memory.tables, lines, used),
            is_prefill=batch.positions < staged.num_given[slots],
            prompt_lens=staged.num_prompt[slots].astype(np.int32),
            query_lens=batch.query_lens.astype(np.int32),
            sampled_rows=batch.sampled_rows.astype(np.int32),
            sampling=sampling_rows(memory, staged, live),
            copies=[staged_copy.copy for staged_copy in copies],
            prompt_logprob_rows=prompt_rows,
            prompt_logprob_targets=[
                memory.tokens[
                    lines[row],
                    batch.positions[row] + 1 : min(ends[row] + 1, staged.num_tokens[slots[row]]),
                ].copy()
                for row in prompt_rows
            ],
            prompt_num_logprobs=[request.num_logprobs for request in batch.prompt_logprobs],
            digest_blocks=batch.digest_blocks.tolist(),
            embeddings=batch.embeddings,
            states=slots.astype(np.int32) if self.limits.num_states else NO_STATES,
            state_copies=state_copies,
            adapters=adapters.astype(np.int32) if adapters.any() else NO_ADAPTERS,
            input_sources=None if ahead is None else ahead.sources(lines[rows], memory),
        )

    # --- after the step ---

    def complete(self, prepared: PreparedStep, output: ExecutionOutput | None) -> StepResult:
        """Append the sampled tokens to their slots and poison those whose row failed.

        `output` is None where nothing was run. Raises ExecutionError if the executor's answer does
        not fit the batch.
        """
        batch = prepared.batch
        if batch is None or output is None:
            return nothing_run(prepared)
        output = check_embeddings(batch, output, self.limits.embedding_size)
        failed = check_output(batch, output, self.limits.vocab_size)
        if prepared.drafted is not None:
            return self._complete_drafted(prepared, prepared.drafted, batch, output, failed)
        self._append_samples(prepared.rows, np.asarray(output.next_tokens), failed)
        if not output.failed_rows:
            self._run = prepared.run or self._begin_run(prepared)
        return step_result(prepared, batch, output, failed)

    def _complete_drafted(
        self,
        prepared: PreparedStep,
        drafted: DraftedStep,
        batch: ExecutionBatch,
        output: ExecutionOutput,
        failed: BoolArray,
    ) -> StepResult:
        """Keep the drafts that are right, and go on as if their rows had been sent without."""
        numbers, sent = self._numbers, drafted.sent
        kept = drafted.kept(output, failed)
        failed = failed[drafted.first_rows]
        batch, output, draft_logprobs = drafted.as_sent(batch, output, kept)
        numbers.num_tokens[sent.targets] += kept
        numbers.num_computed[sent.targets] += kept
        self._append_samples(sent, np.asarray(output.next_tokens), failed)
        result = step_result(replace(prepared, rows=sent), batch, output, failed)
        return with_drafts(result, sent, kept, draft_logprobs)

    def known_text(self, slot: int, most: int) -> KnownText | None:
        """Return what a slot knows, `most` drafts being wanted; None: it is poisoned.

        Its arrays are to be read at once.
        """
        numbers, memory = self._numbers, self._memory
        if not numbers.is_known[slot] or numbers.is_poisoned[slot]:
            return None
        line = numbers.line[slot]
        return KnownText(
            slot,
            memory.tokens[line, : numbers.num_tokens[slot]],
            memory.tables[line, : numbers.num_blocks[slot]],
            is_greedy=memory.sampling[line].temperature == 0.0,
            most=most,
        )

    def poison(self, prepared: PreparedStep) -> None:
        """Trust nothing that the slots of a step hold, because it failed as a whole."""
        self._numbers.is_poisoned[prepared.involved] = True
        self._distrust_copies(prepared)

    def _begin_run(self, prepared: PreparedStep) -> DecodeRun | None:
        """Return what the next step may simply continue, if this one allows it."""
        if not DecodeRun.begins_with(prepared):
            return None
        return DecodeRun(prepared, self._numbers, self.limits)

    def _append_samples(self, rows: LiveRows, next_tokens: Int32Array, failed: BoolArray) -> None:
        """Append the tokens of the rows that did not fail; poison the slots of those that did."""
        numbers, targets = self._numbers, rows.targets
        if failed.any():
            numbers.is_poisoned[rows.batch.slots[failed]] = True
            numbers.is_poisoned[targets[failed[rows.batch.sampled_rows]]] = True
        is_sound = ~numbers.is_poisoned[targets]
        if not is_sound.all():
            targets, next_tokens = targets[is_sound], next_tokens[is_sound]
        self._memory.tokens[numbers.line[targets], numbers.num_tokens[targets]] = next_tokens
        numbers.num_tokens[targets] += 1

    # --- the same for a step that was launched, while the next one may be prepared already ---

    def count_ahead(self, prepared: PreparedStep) -> SamplesAhead:
        """Count the samples of a step just launched, so that the next one can be prepared.

        Steps end in the order they were launched, each by `complete_ahead` or `fail_ahead`; the
        next one can be prepared once all before this one have (`MAX_STEPS_UNDER_WAY`).
        """
        ahead = SamplesAhead.count(prepared, self._numbers, self._memory)
        self._ahead.append(ahead)
        self._run = prepared.run or self._begin_run(prepared)
        return ahead

    def complete_ahead(self, ahead: SamplesAhead, output: ExecutionOutput) -> StepResult:
        """Put the sampled tokens in their places and poison the slots whose row failed.

        Rows on slots that failed in the step before are reported as such. Raises ExecutionError
        like `complete`, and `fail_ahead` is to be called then.
        """
        prepared, batch = ahead.prepared, ahead.prepared.batch
        if batch is None:
            raise ValueError("a step without rows is never launched")
        rows, is_dead = prepared.rows, ahead.is_dead
        output = check_embeddings(batch, output, self.limits.embedding_size)
        failed = check_output(batch, output, self.limits.vocab_size) | is_dead
        result = step_result(prepared, batch, output, failed)
        result = without_dead_rows(result, prepared, is_dead)
        self._ahead.remove(ahead)
        ahead.put(np.asarray(output.next_tokens), self._memory)
        if failed.any():
            unsampled = failed[rows.batch.sampled_rows]
            self._end_lives(
                np.concatenate([rows.batch.slots[failed], rows.targets[unsampled]]),
                np.concatenate([ahead.row_lines[failed], ahead.target_lines[unsampled]]),
            )
        return result

    def fail_ahead(self, ahead: SamplesAhead) -> None:
        """Trust nothing that the slots of a launched step hold, because it failed as a whole."""
        self._ahead.remove(ahead)
        self._end_lives(ahead.prepared.involved, ahead.involved_lines)
        self._distrust_copies(ahead.prepared)

    def _distrust_copies(self, prepared: PreparedStep) -> None:
        """Let no row go on from states that a failed step was to copy."""
        copies = () if prepared.batch is None else prepared.batch.state_copies
        for copy in copies:
            self._numbers.state_tokens[copy.destination] = NOT_COPIED
            if copy.destination < self.limits.max_slots:
                self._numbers.is_poisoned[copy.destination] = True

    def _end_lives(self, slots: Int64Array, lines: Int64Array) -> None:
        """Poison slots whose life is still in the line given beside each."""
        numbers = self._numbers
        numbers.is_poisoned[slots[numbers.line[slots] == lines]] = True
        for later in self._ahead:
            later.lose(lines)
        self._run = None
