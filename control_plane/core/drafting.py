"""Which rows of a step get drafts, and which steps wait for the tokens that drafts follow.

A decode row is usually sent before its newest token is known; drafts follow known tokens only. So
where a text seems to repeat itself, the next step waits for the results of those under way, and
while a step with drafts is under way none follows: how many tokens it brings is not known. Both
cost the time in which the plane waits, and are worth it only while few rows share a step.

Where the plane has a draft model, rows ask it for drafts of the step that comes next, which waits
for them; rows of a text that repeats itself do not.

Constrained rows wait for their newest token anyway. Their drafts are those of their constraints,
and nobody waits for these: other rows go on in steps of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Series

from control_plane.core.batch import StepResult, TokenLogprobs
from control_plane.core.guesses import Guesses
from control_plane.core.interface import MOST_DRAFTS, RequestOutput, SchedulerConfig
from control_plane.core.prompt_lookup import PromptLookup
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import RequestState, Sequence
from control_plane.core.running import RunningSet
from control_plane.core.step import Step

_MOST_ROWS = MOST_DRAFTS + 1
"""Rows of a step and their drafts. On two processors (Zen 4, AVX-512) 4 rows cost as much as one
and each further one a sixth of that; from 8 on a draft costs what a token costs (2026-11-22)."""


_LEAST_LEFT = 16
"""Tokens still to come of a text for which a draft model that has not read it yet is asked."""


class Drafting:
    """Drafts for decode rows, within blocks that these have anyway: memory is nobody's concern.

    A request's last token never is a draft, and no draft ends a text: so a draft that is kept is
    one more token and nothing else. Beams have none.
    """

    __slots__ = ("_block_size", "_has_model", "_least", "_most", "_most_by_constraint",
                 "_most_rows", "_queue", "_running", "num_drafts", "num_kept")  # fmt: skip

    def __init__(
        self, config: SchedulerConfig, block_size: int, running: RunningSet, queue: WaitingQueue
    ) -> None:
        self._most = config.speculative_tokens
        self._has_model = config.draft_model and config.speculative_tokens > 0
        self._most_by_constraint = config.grammar_drafts
        self._least = config.prompt_lookup_min
        self._most_rows = min(_MOST_ROWS, config.max_batch_size, config.max_total_tokens)
        self._block_size = block_size
        self._running = running
        self._queue = queue
        self.num_drafts = 0
        self.num_kept = 0

    def is_waiting(self, in_flight: Series[Step]) -> bool:
        """Whether no step is to be sent before one of those under way has its result."""
        if self._most == 0 or not in_flight:
            return False
        if in_flight[-1].holds_back:
            return True
        decoding = self._running.decoding
        if len(decoding) >= self._most_rows or self._running.prefilling or self._queue.has_next:
            return False
        is_waiting = False
        for seq in decoding.values():
            if seq.num_pending_tokens and self._room(seq, 1, self._most) > 0 and self._find(seq, 1):
                seq.awaits_draft = is_waiting = True
        return is_waiting

    def add(self, step: Step) -> None:
        """Give drafts to the rows of a step, booked decode rows all, as far as there is room."""
        room = self._most_rows - len(step.rows)
        if room <= 0:
            return
        if step.has_constraints and self._most_by_constraint > 0:
            room = self._add_constrained(step, room)
        for row, seq in enumerate(step.rows) if self._most > 0 else ():
            if seq.num_pending_tokens > 1 or seq.constraint is not None:
                continue
            most = min(room, self._room(seq, 0, self._most))
            drafts = self._find(seq, most) if most > 0 else []
            if not drafts and most > 0 and seq.guesses is not None and self._may_draft(seq):
                drafts = _before_an_end(seq, seq.guesses.take(most))
                if drafts:
                    step.guessed_rows.add(row)
            if drafts:
                step.drafts[row] = drafts
                step.holds_back = True
                room -= len(drafts)
                self.num_drafts += len(drafts)
            elif seq.awaits_draft and seq.lookup is not None:
                seq.lookup.note(0)  # what was waited for in vain
            seq.awaits_draft = False
        if self._has_model and step.rows:
            self._want(step)

    def _want(self, step: Step) -> None:
        """Have the draft model asked what follows the rows of a step, as far as there is room.

        The next step has the same rows, likely, and an equal share for each.
        """
        share = (self._most_rows - len(step.rows)) // len(step.rows)
        for row, seq in enumerate(step.rows) if share > 0 else ():
            is_alike = row in step.drafts and row not in step.guessed_rows
            if is_alike or not self._may_draft(seq, num_more=1):
                continue
            num_left = seq.max_computed_tokens - seq.num_computed_tokens
            if seq.guesses is None:
                if num_left < _LEAST_LEFT:
                    continue
                seq.guesses = Guesses(seq.output_tokens)
            # Drafts end with the block; where in it the next row is, depends on the drafts of this.
            most = min(share, self._most, num_left - 2)
            if row not in step.drafts:
                most = min(most, self._room(seq, 1, most))
            if most > 0 and not seq.guesses.is_pausing:
                step.wanted_drafts[row] = most
                step.holds_back = True

    def keep_guesses(self, step: Step, next_drafts: Mapping[int, list[int]]) -> None:
        """Keep what the draft model guessed behind the samples, once those are accepted."""
        for row in step.wanted_drafts:
            guesses = step.rows[row].guesses
            if guesses is not None:
                guesses.keep(next_drafts.get(row, []))

    def _add_constrained(self, step: Step, room: int) -> int:
        """Give constrained rows the drafts of their constraints; how much room is left.

        Each may have an equal share of the room, and what those before it leave.
        """
        rows = [(row, seq) for row, seq in enumerate(step.rows) if seq.constraint is not None]
        for index, (row, seq) in enumerate(rows):
            share = -(-room // (len(rows) - index))
            most = min(share, self._room(seq, 0, self._most_by_constraint))
            is_held = seq.num_computed_tokens < seq.first_end  # a draft may be followed by an end
            if most <= 0 or seq.draining or is_held or seq.constraint is None:
                continue
            found = seq.constraint.draft(most)
            drafts = _before_an_end(seq, [draft.token_id for draft in found])
            if drafts:
                step.drafts[row] = drafts
                step.draft_masks[row] = [draft.allowed_tokens for draft in found[: len(drafts)]]
                room -= len(drafts)
                self.num_drafts += len(drafts)
        return room

    def _room(self, seq: Sequence, num_more: int, most: int) -> int:
        """Return how many drafts, `most` at most, may follow a row that ends so much further on."""
        end = seq.num_computed_tokens + num_more
        return min(most, -end % self._block_size, seq.max_computed_tokens - end - 1)

    @staticmethod
    def _may_draft(seq: Sequence, num_more: int = 0) -> bool:
        """Whether the row so much further on may have drafts that are no constraint's."""
        if seq.is_beam or seq.draining or seq.constraint is not None:
            return False
        return seq.num_computed_tokens + num_more >= seq.first_end  # a draft has no mask

    def _find(self, seq: Sequence, most: int) -> list[int]:
        if not self._may_draft(seq):
            return []
        if seq.lookup is None:
            seq.lookup = PromptLookup(seq.request.input_tokens, seq.output_tokens, self._least)
        return _before_an_end(seq, seq.lookup.find(most))

    def take(self, step: Step, result: StepResult) -> list[RequestOutput]:
        """Append the drafts that were kept to their samples; the events.

        The tokens that follow them are still to come.
        """
        events: list[RequestOutput] = []
        running = self._running
        for row, drafts in step.drafts.items():
            seq = step.rows[row]
            if seq.is_done or seq.discards:
                continue
            num_kept = result.kept_drafts[row] if result.kept_drafts else 0
            if row in step.guessed_rows:
                if seq.guesses is not None:
                    seq.guesses.note(num_kept)
            elif seq.lookup is not None:
                seq.lookup.note(num_kept)
            if num_kept == 0:
                continue
            self.num_kept += num_kept
            seq.num_computed_tokens += num_kept
            running.num_kv_tokens += num_kept
            logprobs: Series[TokenLogprobs] = result.draft_logprobs.get(row, ())
            for index, token in enumerate(drafts[:num_kept]):
                seq.output_tokens.append(token)
                events.append(
                    RequestOutput(
                        seq.request_id,
                        (token,),
                        RequestState.DECODE,
                        logprobs=tuple(logprobs[index : index + 1]),
                        sample_index=seq.sample_index,
                    )
                )
            if seq.num_computed_tokens % self._block_size == 0 and seq.chain is not None:
                running.filled.add(seq, seq.num_computed_tokens // self._block_size - 1)
        return events


def _before_an_end(seq: Sequence, found: list[int]) -> list[int]:
    """Return the tokens before the first that would end the sample."""
    for index, token in enumerate(found):
        if token in seq.end_token_ids:
            return found[:index]
    return found
