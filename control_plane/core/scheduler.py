"""Continuous batching: which tokens of which request the next step computes.

One rule, no phases: each step lets `num_computed_tokens` of a running sequence catch up with its
`num_tokens`. *Decode* is the row whose only missing token is the newest one; everything else, a
prompt or a preempted request that is computed anew, is *prefill*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from control_plane.core.batch import RowFailure, StepResult
from control_plane.core.interface import (
    RequestOutput,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerProtocol,
    SchedulerStats,
)
from control_plane.core.kv_cache import KVCacheManagerProtocol
from control_plane.core.limits import RequestLimits
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import FinishReason, Request, RequestState, Sequence
from control_plane.core.running import RunningSet
from control_plane.core.slots import SlotPool
from control_plane.core.step import Step
from planes.errors import SchedulerError

__all__ = [
    "Scheduler",
    "SchedulerProtocol",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "RequestOutput",
]

# A step that reserves room for prefill keeps one row and this part of its tokens for it.
_RESERVED_TOKEN_DIVISOR = 4


class Scheduler:
    """Decides every step; owned by one thread, never waits, does no I/O.

    Steps may be scheduled before earlier ones are committed; commits come in the order of the
    steps. A row may be scheduled while its newest token is still to be sampled by a step in
    flight: the compute plane continues from the token it sampled itself.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManagerProtocol) -> None:
        self._config = config
        self._block_size = kv_cache.block_size
        num_blocks = kv_cache.get_memory_stats().total_blocks
        self._limits = RequestLimits(config.max_model_len, kv_cache.block_size, num_blocks)
        self._threshold_blocks = int(config.memory_threshold * num_blocks)
        self._queue = WaitingQueue()
        self._running = RunningSet(kv_cache, SlotPool(config.num_slots), self._queue)
        self._in_flight: deque[Step] = deque()
        self._completed: list[Request] = []
        self._num_arrivals = 0
        self._last_step = 0
        self._num_steps = 0
        self._steps_without_prefill = 0

    # Requests

    def add_request(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises what `RequestLimits.check` raises, SchedulerError if it is not new.
        """
        self._check(request)
        self._num_arrivals += 1
        self._queue.append(self._num_arrivals, request)
        return request.id

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its final event, or None if it is unknown or has ended.

        Blocks and slot are free at once, or with the commit of its last step in flight.
        """
        waiting = self._queue.remove(request_id)
        if waiting is not None:
            return self._end(waiting, RequestState.CANCELLED, FinishReason.CANCELLED)
        seq = self._running.get(request_id)
        if seq is None or seq.request.state.is_final:
            return None
        event = self._end(seq.request, RequestState.CANCELLED, FinishReason.CANCELLED)
        self._running.drain(seq)
        if seq.num_in_flight == 0:
            self._running.release(seq)
        return event

    def get_completed(self) -> list[Request]:
        """Return the requests that ended since the last call; call it, or they pile up."""
        completed, self._completed = self._completed, []
        return completed

    def has_pending_work(self) -> bool:
        """Whether any request waits, runs or still holds blocks."""
        return len(self._running) > 0 or len(self._queue) > 0

    def get_stats(self) -> SchedulerStats:
        """Return the counters."""
        return SchedulerStats(
            num_steps=self._num_steps,
            num_preemptions=self._running.num_preemptions,
            num_running=len(self._running),
            num_waiting=len(self._queue),
            num_in_flight=len(self._in_flight),
        )

    # Steps

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step to send; None if nothing can be computed before a commit.

        Decode rows come first, those served longest ago first among them; then prefill in order
        of arrival, within what is left of the step. If decoding filled `prefill_patience` steps,
        a row and some tokens are kept for prefill, until it had a row.
        """
        running = self._running
        running.begin_step()
        max_rows = self._config.max_batch_size
        max_tokens = self._config.max_total_tokens
        step = Step(self._last_step + 1)
        candidates = iter(list(running.decoding.values()))
        if self._steps_without_prefill >= self._config.prefill_patience:
            share = -(-max_tokens // _RESERVED_TOKEN_DIVISOR)
            self._book_decodes(step, candidates, max_rows - 1, max_tokens - share)
        else:
            self._book_decodes(step, candidates, max_rows, max_tokens)
        has_prefill_work = len(running.prefilling) > 0 or len(self._queue) > 0
        is_full = self._token_budget(step) == 0
        self._book_prefills(step)
        self._admit(step)
        if step.num_prefill_rows > 0 or not has_prefill_work:
            self._steps_without_prefill = 0
        elif is_full:  # otherwise memory was short, and waiting gives no right to anybody's blocks
            self._steps_without_prefill += 1
        if step.num_prefill_rows == 0:  # what was reserved, if anything, found no use
            self._book_decodes(step, candidates, max_rows, max_tokens)
        if not step.rows:
            return None
        self._last_step = step.step_id
        self._num_steps += 1
        self._in_flight.append(step)
        return step.output(running.slots.take_released())

    def _book_decodes(
        self, step: Step, candidates: Iterator[Sequence], max_rows: int, max_tokens: int
    ) -> None:
        """Book rows for `candidates` until the step has `max_rows` or `max_tokens`."""
        running = self._running
        block_size = self._block_size
        rows = step.rows
        while len(rows) < max_rows and step.num_tokens < max_tokens:
            seq = next(candidates, None)
            if seq is None:
                break
            if seq.draining:  # preempted by a row before
                continue
            position = seq.num_computed_tokens
            # Only a full last block makes a decode row grow: most steps skip the call.
            new_block_ids = running.grow(seq, position + 1) if position % block_size == 0 else []
            if new_block_ids is not None:
                self._book(step, seq, 1, new_block_ids, samples=True)
        step.num_decode_rows = len(rows)

    def _book_prefills(self, step: Step) -> None:
        """Book the next chunk of each sequence under way, oldest first."""
        for seq in list(self._running.prefilling.values()):
            budget = self._token_budget(step)
            if budget == 0:
                return
            if seq.draining:  # preempted by a row before
                continue
            num_missing = seq.num_tokens - seq.num_computed_tokens
            num_tokens = min(num_missing, budget)
            new_block_ids = self._running.grow(seq, seq.num_computed_tokens + num_tokens)
            if new_block_ids is None:
                return
            self._book(step, seq, num_tokens, new_block_ids, samples=num_tokens == num_missing)

    def _admit(self, step: Step) -> None:
        """Start waiting requests, oldest first, while rows, tokens, slots and memory last."""
        running = self._running
        if len(self._queue) == 0 or running.is_preempting:  # nobody passes the preempted
            return
        projected_blocks = running.projected_blocks
        while len(self._queue) > 0:
            waiting = self._queue.peek()
            num_missing = len(waiting.request.input_tokens) + len(waiting.request.output_tokens)
            num_tokens = min(num_missing, self._token_budget(step))
            projected_blocks += running.blocks_for(num_missing + 1)
            if projected_blocks > self._threshold_blocks and len(running) > 0:
                return
            if num_tokens == 0 or not running.can_admit(num_tokens):
                return
            self._queue.pop()
            seq, block_ids = running.admit(waiting, num_tokens)
            step.add_start(seq, block_ids)
            seq.needs_start = False
            self._book(step, seq, num_tokens, [], samples=num_tokens == num_missing)

    def _token_budget(self, step: Step) -> int:
        """Return how many tokens one more row of prefill may have in the step."""
        config = self._config
        if len(step.rows) >= config.max_batch_size:
            return 0
        budget = config.max_total_tokens - step.num_tokens
        if config.max_prefill_tokens is not None:
            budget = min(budget, config.max_prefill_tokens - step.num_prefill_tokens)
        return budget

    def _book(
        self, step: Step, seq: Sequence, num_tokens: int, new_block_ids: list[int], *, samples: bool
    ) -> None:
        """Put a row into the step; its blocks are allocated."""
        step.add_row(seq, num_tokens, new_block_ids, samples=samples)
        self._running.advance(seq, num_tokens, step.step_id, samples=samples)

    # Results

    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Take in the result of the oldest step in flight; what it means for each request.

        A refused step fails its requests, and ends the epoch: later steps in flight were made as if
        it had run, so they could do harm. The caller opens a new session, then `lose_epoch`.

        Raises SchedulerError, having changed nothing, if the result does not fit that step.
        """
        if not self._in_flight:
            raise SchedulerError(f"result of step {result.step_id}, but no step is in flight")
        step = self._in_flight[0]
        step.check_result(result)
        self._in_flight.popleft()
        events: list[RequestOutput] = []
        if result.refusal is not None:
            for seq in step.rows:
                self._fail(seq, result.refusal, events)
            self.lose_epoch(self._last_step)
            return events
        if result.row_failures:
            self._fail_rows(step, result.row_failures, events)
        self._accept(step, result, events)
        for seq in step.rows:
            seq.num_in_flight -= 1
            if seq.draining and seq.num_in_flight == 0:
                self._running.release(seq)
        return events

    def update_sequences(self, result: StepResult) -> list[RequestOutput]:
        """Do what `commit` does, by the seed documents' name."""
        return self.commit(result)

    def _accept(self, step: Step, result: StepResult, events: list[RequestOutput]) -> None:
        """Append the sampled tokens to their requests and end those that are done."""
        logprobs = result.sample_logprobs
        for sample, (seq, token_id) in enumerate(
            zip(step.sampled, result.sampled_token_ids, strict=True)
        ):
            seq.num_pending_tokens -= 1
            request = seq.request
            if seq.draining and request.state.is_final:
                continue  # ended while this row was on its way: the token is discarded
            params = request.params
            if token_id in request.eos_token_ids and not params.ignore_eos:
                events.append(self._end(request, RequestState.COMPLETED, FinishReason.STOP))
                self._running.drain(seq)
                continue
            output_tokens = request.output_tokens
            output_tokens.append(token_id)
            if len(output_tokens) >= params.max_tokens:
                event = self._end(request, RequestState.COMPLETED, FinishReason.LENGTH)
                events.append(event._replace(new_token_ids=(token_id,)))
                self._running.drain(seq)
            else:
                request.state = RequestState.DECODE
                events.append(RequestOutput(request.id, (token_id,), RequestState.DECODE))
            if sample in logprobs:
                events[-1] = events[-1]._replace(logprobs=(logprobs[sample],))

    def _fail_rows(
        self, step: Step, failures: tuple[RowFailure, ...], events: list[RequestOutput]
    ) -> None:
        """End the requests whose rows failed; nobody else is touched."""
        for failure in failures:
            self._fail(step.rows[failure.row], failure.message, events)

    def _fail(self, seq: Sequence, message: str, events: list[RequestOutput]) -> None:
        """End the sequence's request, unless it has ended, because of an error."""
        if seq.request.state.is_final:
            return
        events.append(self._end(seq.request, RequestState.FAILED, FinishReason.ERROR, message))
        self._running.drain(seq)

    def _end(
        self,
        request: Request,
        state: RequestState,
        reason: FinishReason,
        error: str | None = None,
    ) -> RequestOutput:
        """Make the request final and return the event that says so."""
        request.state = state
        request.finish_reason = reason
        request.error = error
        self._completed.append(request)
        return RequestOutput(request.id, (), state, reason, error)

    # Epochs

    def lose_epoch(self, last_step: int = 0) -> None:
        """Forget what the compute plane held; the next step is `last_step + 1`.

        Everything running is queued again, in order of arrival, to be computed anew from its
        prompt and the tokens committed so far. Steps in flight are dropped and never committed.
        Also the way to set the step counter after opening a session.
        """
        self._in_flight.clear()
        self._running.release_all()
        self._last_step = last_step

    def _check(self, request: Request) -> None:
        """Refuse what can never run."""
        self._limits.check(request.num_prompt_tokens, request.max_tokens)
        if request.state is not RequestState.PENDING:
            raise SchedulerError(f"request {request.id} is {request.state.value}, not pending")
        if len(request.output_tokens) >= request.max_tokens:
            raise SchedulerError(f"request {request.id} has all its {request.max_tokens} tokens")
        if request.id in self._running or request.id in self._queue:
            raise SchedulerError(f"request {request.id} is known already")
