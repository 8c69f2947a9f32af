"""What the result of a step means for each request."""

from __future__ import annotations

from control_plane.core.batch import EndToken, StepResult
from control_plane.core.beams import Beams
from control_plane.core.drafting import Drafting
from control_plane.core.failures import Failures
from control_plane.core.interface import RequestOutput
from control_plane.core.request import FinishReason, Request, RequestState, Sequence
from control_plane.core.request_table import RequestTable
from control_plane.core.running import RunningSet
from control_plane.core.step import Step


class Results:
    """Appends tokens to their requests and ends what is done or has failed."""

    __slots__ = ("_beams", "_drafting", "_failures", "_requests", "_running")

    def __init__(
        self,
        requests: RequestTable,
        running: RunningSet,
        beams: Beams,
        drafting: Drafting,
        failures: Failures,
    ) -> None:
        self._drafting = drafting
        self._failures = failures
        self._requests = requests
        self._running = running
        self._beams = beams

    def take(self, step: Step, result: StepResult) -> list[RequestOutput]:
        """Take in the result of a step that ran; its shape is checked."""
        events: list[RequestOutput] = []
        running = self._running
        running.last_committed_step = step.step_id
        if result.row_failures:
            for seq, message in self._failures.contain(step, result.row_failures):
                seq.discards = True
                self._fail(seq, message, None, events)
        filled = running.filled
        for seq, index in step.fills:  # unless the sequence has ended, their tokens are known now
            if not seq.is_done and not seq.discards:
                filled.add(seq, index)
        if result.prompt_logprobs:
            self._note_prompt_logprobs(step, result)
        if step.drafts:
            events += self._drafting.take(step, result)
        if step.has_constraints:
            self._advance(step, result, events)
        self._accept(step, result, events)
        if step.wanted_drafts:
            self._drafting.keep_guesses(step, result.next_drafts)
        if result.embeddings:
            self._take_embeddings(step, result, events)
        for seq in step.unsampled:
            seq.num_in_flight -= 1
            if seq.draining and seq.num_in_flight == 0:
                running.release(seq)
        filled.settle_some()
        return events

    def refuse(self, step: Step, message: str) -> list[RequestOutput]:
        """Fail the requests of a step that was refused whole."""
        events: list[RequestOutput] = []
        for seq in step.rows:
            seq.discards = True
            self._fail(seq, message, None, events)
        return events

    def _advance(self, step: Step, result: StepResult, events: list[RequestOutput]) -> None:
        """Tell the constraints the tokens that their samples are about to have.

        A sample whose constraint cannot go on does not have its token, and fails its request.
        """
        drafts, kept = step.drafts, result.kept_drafts
        taken = [
            (seq.constraint, [*drafts.get(k, ())[: kept[k] if kept else 0], token_id], seq)
            for k, (seq, token_id) in enumerate(
                zip(step.sampled, result.sampled_token_ids, strict=True)
            )
            if seq.constraint is not None
            and not (seq.is_done or seq.discards)
            and token_id not in seq.end_token_ids
        ]
        if not taken:
            return
        are_allowed = [_is_allowed(seq.allowed_tokens(), tokens[0]) for _, tokens, seq in taken]
        taken[0][0].constrainer.advance([entry[:2] for entry in taken])
        for (constraint, tokens, seq), is_allowed in zip(taken, are_allowed, strict=True):
            if constraint.error is None:
                continue
            seq.discards = True
            if is_allowed:
                self._fail(seq, *_end_of_form(seq.request, constraint.error), events)
            else:
                why = f"the compute plane sampled token {tokens[0]}, which its form forbids"
                self._fail(seq, why, None, events)

    def _accept(self, step: Step, result: StepResult, events: list[RequestOutput]) -> None:
        """Append the sampled tokens to their samples and end those that are done."""
        running = self._running
        decode = RequestState.DECODE
        add_event = events.append
        for seq, token_id in zip(step.sampled, result.sampled_token_ids, strict=True):
            seq.num_in_flight = num_in_flight = seq.num_in_flight - 1
            seq.num_pending_tokens -= 1
            if seq.draining:
                if not seq.is_done and not seq.discards and not seq.is_beam:
                    add_event(self._append(seq, token_id))
                if num_in_flight == 0:
                    running.release(seq)
            elif seq.is_beam:
                pass  # beams are taken together, by `_take_beams`
            elif (
                token_id in seq.end_token_ids
                or seq.request.state is not decode
                or seq.constraint is not None
            ):
                add_event(self._append(seq, token_id))
                if seq.draining and num_in_flight == 0:
                    running.release(seq)
            else:
                # Not the last token: a sequence drains as soon as that one is on its way.
                seq.output_tokens.append(token_id)
                add_event(
                    RequestOutput(
                        seq.request_id, (token_id,), decode, None, None, (), seq.sample_index
                    )
                )
        if result.sample_logprobs:
            self._add_logprobs(step, result, events)
            self._take_beams(step, result, events)

    def _take_beams(self, step: Step, result: StepResult, events: list[RequestOutput]) -> None:
        """Note what may follow each beam, and let the searches go on that have it of all beams."""
        for sample, seq in enumerate(step.sampled):
            if not seq.is_beam or sample not in result.sample_logprobs:
                continue
            if seq in self._running and not seq.draining:  # else it is computed anew
                seq.logprobs = result.sample_logprobs[sample]
                events.extend(self._beams.advance(seq.group))

    def _append(self, seq: Sequence, token_id: int) -> RequestOutput:
        """Append a token that may be the first, the last, or end the sample."""
        output_tokens, request = seq.output_tokens, seq.request
        if token_id in seq.end_token_ids:
            if token_id not in request.params.stop_token_ids:
                return self._requests.finish(seq, FinishReason.STOP)
            kept = (token_id,) if request.params.include_stop else ()
            output_tokens.extend(kept)
            event = self._requests.finish(seq, FinishReason.STOP)
            return event._replace(new_token_ids=kept, matched_stop=token_id)
        output_tokens.append(token_id)
        if request.state is not RequestState.DECODE:
            request.enter(RequestState.DECODE, self._running.now)
        if seq.constraint is not None and seq.constraint.is_complete:
            return self._requests.finish(seq, FinishReason.STOP)._replace(new_token_ids=(token_id,))
        if len(output_tokens) >= seq.max_tokens:
            return self._requests.finish(seq, FinishReason.LENGTH)._replace(
                new_token_ids=(token_id,)
            )
        return RequestOutput(
            request.id, (token_id,), RequestState.DECODE, sample_index=seq.sample_index
        )

    def _note_prompt_logprobs(self, step: Step, result: StepResult) -> None:
        """Append what follows the log-probabilities known of each prompt.

        A prompt that is computed anew brings some again, and a row that goes on behind the prompt
        has more than those of the prompt.
        """
        for row, first_position, entries in result.prompt_logprobs:
            seq = step.rows[row]
            if seq.is_done or seq.discards:
                continue
            known = seq.request.prompt_logprobs
            first = len(known) + 1 - first_position
            if first >= 0:
                known.extend(entries[first : len(seq.request.input_tokens) - first_position])

    def _take_embeddings(self, step: Step, result: StepResult, events: list[RequestOutput]) -> None:
        """Take hidden states into the embeddings of their requests; whole ones end those."""
        for row, values in result.embeddings:
            seq = step.rows[row]
            embedding = seq.request.embedding
            if seq.is_done or seq.discards or embedding is None:
                continue
            embedding.take(*step.tokens_of(row), values)
            if embedding.num_tokens == len(seq.request.input_tokens):
                events.append(self._requests.finish(seq, FinishReason.STOP))

    # Failures

    def _fail(
        self, seq: Sequence, message: str, field: str | None, events: list[RequestOutput]
    ) -> None:
        """End the sequence's request, unless it or the sample has ended, because of an error.

        `field`: the parameter that is to blame, if one is.
        """
        if not seq.is_done:
            events.append(self._requests.end(seq.group, RequestState.FAILED, message, field))

    def _add_logprobs(self, step: Step, result: StepResult, events: list[RequestOutput]) -> None:
        """Put the log-probabilities into the events of their tokens."""
        wanted = {
            (seq.request_id, seq.sample_index): EndToken(
                result.sampled_token_ids[sample], result.sample_logprobs[sample]
            )
            for sample, seq in enumerate(step.sampled)
            if sample in result.sample_logprobs
        }
        for index, event in enumerate(events):
            token = wanted.get((event.request_id, event.sample_index))
            if token is None or event.logprobs:  # drafts have their own
                continue
            if event.new_token_ids:
                events[index] = event._replace(logprobs=(token.logprobs,))
            elif event.finish_reason is FinishReason.STOP:
                events[index] = event._replace(end_token=token)


def _is_allowed(mask: bytes | None, token_id: int) -> bool:
    """Whether a token's bit is set, or there is no mask."""
    return mask is None or (
        token_id // 8 < len(mask) and bool(mask[token_id // 8] >> token_id % 8 & 1)
    )


def _end_of_form(request: Request, why: str) -> tuple[str, str | None]:
    """Return what is said of an answer that can keep to its form no longer, and of what field."""
    wanted = request.params.structured_outputs
    if wanted is None:
        return why, None
    wrong = wanted.wrong(wanted.kind, f"can no longer be satisfied: {why}")
    return wrong.message, wrong.field
