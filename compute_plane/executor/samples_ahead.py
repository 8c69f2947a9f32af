"""Samples that slots count before they are there, so that the next step can be prepared.

A launched step will append tokens to slots. The slots count them at once and keep their places;
the tokens come with the step's answer:

    a slot's line   │ p p p p p s s ? │        ? : a sample of the step under way
                                    └ counted by num_tokens, 0 until it is known

A row of the next step that computes such a token names the sample instead
(`ExecutionBatch.input_sources`). Everything else of a step does not depend on the tokens, but for
what `check_needs_no_sample` lists.

A slot's *life* lies in one line from start to start, and lines are not given away while a step that
knew them is under way. So a step that fails late is told by lines which lives end: a slot that was
started again since is sound, and rows of steps launched meanwhile on a life that ended are dead.

Array letters: T tokens, S rows, K samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from compute_plane.executor.interface import BoolArray, Int32Array
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers
from compute_plane.executor.step import Int64Array

if TYPE_CHECKING:
    from compute_plane.executor.decode_run import PreparedStep
    from compute_plane.executor.row_stage import LiveRows

NOWHERE = -1


class SampleAwaited(Exception):
    """A batch needs a token on the host that a step under way has not sampled yet.

    No error: it is prepared again when the step is over.
    """


@dataclass(slots=True, eq=False)
class SamplesAhead:
    """What is known of a step that is launched.

    `row_lines` [S], `target_lines` [K], `involved_lines`: the lines of the slots of its rows, of
    its samples, and of all that a failing step takes along. `is_counted` [K]: samples that their
    slots count; not those of poisoned slots. `places` [K]: where in its line each token belongs.
    `is_dead` [S]: rows whose slot failed in a step before, which was known too late.
    """

    prepared: PreparedStep
    row_lines: Int64Array
    target_lines: Int64Array
    involved_lines: Int64Array
    is_counted: BoolArray
    places: Int64Array
    is_dead: BoolArray = field(init=False)

    def __post_init__(self) -> None:
        self.is_dead = np.zeros(self.row_lines.size, dtype=np.bool_)

    @classmethod
    def count(
        cls, prepared: PreparedStep, numbers: SlotNumbers, memory: SlotMemory
    ) -> SamplesAhead:
        """Count the samples of a step in their slots."""
        rows = prepared.rows
        targets = rows.targets
        lines = numbers.line[targets]
        is_counted = ~numbers.is_poisoned[targets]
        places = numbers.num_tokens[targets]
        memory.tokens[lines[is_counted], places[is_counted]] = 0
        numbers.num_tokens[targets[is_counted]] += 1
        return cls(
            prepared,
            numbers.line[rows.batch.slots],
            lines,
            numbers.line[prepared.involved],
            is_counted,
            places,
        )

    def put(self, next_tokens: Int32Array, memory: SlotMemory) -> None:
        """Put the tokens [K] in their places."""
        lines, places = self.target_lines[self.is_counted], self.places[self.is_counted]
        memory.tokens[lines, places] = next_tokens[self.is_counted]

    def sources(self, lines: Int64Array, memory: SlotMemory) -> Int32Array | None:
        """Return for tokens, in these lines [T], which sample each one is; None if all are known.

        A row of a slot that awaits a sample computes that token and, by `check_needs_no_sample`, no
        other.
        """
        counted = np.flatnonzero(self.is_counted)
        if not counted.size:
            return None
        sample_of_line = np.full(len(memory.tokens), NOWHERE, dtype=np.int32)
        sample_of_line[self.target_lines[counted]] = counted
        sources: Int32Array = sample_of_line[lines]
        return sources if (sources != NOWHERE).any() else None

    def has_line(self, lines: Int64Array) -> BoolArray:
        """Return which of some lines await a sample of this step."""
        return np.isin(lines, self.target_lines[self.is_counted])

    def involves(self, line: int) -> bool:
        """Whether the life in a line may end with this step, or get a token by it."""
        return bool((self.involved_lines == line).any())

    def lose(self, lines: Int64Array) -> None:
        """Note that the lives in some lines have ended in a step before this one."""
        self.is_dead |= np.isin(self.row_lines, lines)


def check_needs_no_sample(ahead: SamplesAhead, live: LiveRows, staged: SlotNumbers) -> None:
    """Raise SampleAwaited if a batch cannot be prepared before the samples are there.

    That is: tokens given behind one that is awaited; log-probabilities of a prompt in such a slot,
    whose targets are tokens; a sample for another slot than its row's where one of both awaits one,
    since the history of the target is then not what the row computes; digests of blocks, for which
    a launch waits anyway. Penalties can go ahead: their histories end with the row's own token.
    """
    batch = live.batch
    lines = staged.line[batch.slots]
    needs_sample = bool(batch.digest_blocks.size)
    if batch.token_ids.size:
        needs_sample |= bool(ahead.has_line(lines[batch.token_counts > 0]).any())
    if batch.prompt_logprobs:
        asked = [request.row for request in batch.prompt_logprobs]
        needs_sample |= bool(ahead.has_line(lines[asked]).any())
    if batch.sampled_slots.size:
        sources = batch.slots[batch.sampled_rows]
        are_two = live.targets != sources
        both = np.concatenate([live.targets[are_two], sources[are_two]])
        needs_sample |= bool(ahead.has_line(staged.line[both]).any())
    if needs_sample:
        raise SampleAwaited
