"""The engine's books: requests under way, their milestones, and the sums of all that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from control_plane.core.batch import TokenLogprobs
from control_plane.core.interface import RequestOutput, SchedulerStats
from control_plane.core.request import FinishReason, Request, RequestState, StateChange
from control_plane.engine.events import RequestEnd, RequestInfo, RequestTimings, RequestUpdate
from control_plane.errors import RequestFailedError
from control_plane.metrics.plane_meter import PlaneMeter
from control_plane.telemetry import EngineMetrics, Tally
from planes.errors import EngineError, ValidationError

NUM_ENDED_KEPT = 64
"""Requests that are still shown after their end."""


@dataclass(slots=True)
class Entry:
    """A request under way and its milestones, in the clock's seconds.

    `num_vain_losses`: planes lost in a row while they computed it, without a token of it between.
    """

    request: Request
    first_step_at: float | None = None
    first_token_at: float | None = None
    owes_prompt_logprobs: bool = False
    num_given_tokens: int = 0
    num_tokens_at_loss: int = 0
    num_vain_losses: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that have come of it."""
        search = self.request.search
        if search is None:
            return self.num_given_tokens
        # It gives nothing out before its end.
        return max((len(beam.tokens) for beam in search.beams), default=0)

    @property
    def has_got_on(self) -> bool:
        """Whether a token has come of it since the last loss."""
        return self.num_tokens > self.num_tokens_at_loss

    def note_loss(self) -> None:
        """Count a plane that was lost while it computed the request."""
        self.num_vain_losses = 0 if self.has_got_on else self.num_vain_losses + 1
        self.num_tokens_at_loss = self.num_tokens

    def prompt_logprobs(self, output: RequestOutput) -> tuple[TokenLogprobs, ...] | None:
        """Return those of the prompt once, with the first news that say it is computed."""
        is_cut_off = output.state in (RequestState.CANCELLED, RequestState.FAILED)
        if is_cut_off or not (output.new_token_ids or output.finish_reason):
            return None
        self.owes_prompt_logprobs = False
        return tuple(self.request.prompt_logprobs)


class Ledger:
    """Turns what happens to requests into updates; engine thread only.

    `clock`: monotonic seconds, the same that stamped `Request.arrival_time`. `meter`: is told of
    prompts that were looked up in the prefix cache.
    """

    def __init__(self, clock: Callable[[], float], meter: PlaneMeter | None = None) -> None:
        self._clock = clock
        self._meter = meter or PlaneMeter()
        self._open: dict[int, Entry] = {}
        self._ended: deque[RequestInfo] = deque(maxlen=NUM_ENDED_KEPT)
        self._updates: list[RequestUpdate] = []
        self._tally = Tally()
        self._counted_until = clock()
        self._was_busy = False

    @property
    def num_open(self) -> int:
        """Requests admitted and not ended."""
        return len(self._open)

    def open_ids(self) -> list[int]:
        """Ids of the requests admitted and not ended."""
        return list(self._open)

    def open_requests(self) -> list[Request]:
        """Return the requests admitted and not ended."""
        return [entry.request for entry in self._open.values()]

    def release(self, request_id: int) -> Entry:
        """Strike a request off that goes on elsewhere; its entry goes with it."""
        return self._open.pop(request_id)

    def adopt(self, entry: Entry) -> None:
        """Go on with the entry of a request from elsewhere; its sums stay where they grew."""
        # A beam search may begin anew.
        entry.num_tokens_at_loss = min(entry.num_tokens_at_loss, entry.num_tokens)
        self._open[entry.request.id] = entry

    def take_updates(self) -> list[RequestUpdate]:
        """Hand over the news since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def admit(self, request: Request) -> None:
        """Open an entry for a request the scheduler has taken."""
        self._tally.total_requests += 1
        self._tally.prompt_tokens += len(request.input_tokens)
        owes_logprobs = request.params.num_prompt_logprobs is not None
        self._open[request.id] = Entry(request, owes_prompt_logprobs=owes_logprobs)
        self._updates.append(RequestUpdate(request.id))

    def refuse(self, request: Request, error: EngineError) -> None:
        """Note that a request was not taken; it counts in no sum."""
        timings = RequestTimings(None, None, self._clock() - request.arrival_time)
        end = RequestEnd(RequestState.FAILED, FinishReason.ERROR, timings, error)
        self._updates.append(RequestUpdate(request.id, end=end))

    def note_step(self, request_ids: Iterable[int]) -> None:
        """Note that a step with prefill rows of these requests is sent."""
        now = self._clock()
        for request_id in request_ids:
            entry = self._open.get(request_id)
            if entry is not None and entry.first_step_at is None:
                entry.first_step_at = now
                request = entry.request
                self._tally.cached_tokens += request.cached_tokens
                if request.uses_cache:
                    self._meter.note_prefix(request.num_prompt_tokens, request.cached_tokens)

    def take(self, output: RequestOutput, at: float | None = None) -> None:
        """Note the scheduler's news of one request; `at`: when it became known, None: now."""
        entry = self._open.get(output.request_id)
        if entry is None:
            return
        if at is None:
            at = self._clock()
        if output.new_token_ids:
            self._tally.generated_tokens += len(output.new_token_ids)
            entry.num_given_tokens += len(output.new_token_ids)
            if entry.first_token_at is None:
                entry.first_token_at = at
        end, reason = None, output.finish_reason
        if output.state.is_final:
            if output.state is not RequestState.COMPLETED:
                reason = None  # of no sample in particular: the end is that of all that go on
            error: EngineError | None = None
            if output.state is RequestState.FAILED:
                error = RequestFailedError(output.error or "the request failed")
                if output.error_field is not None:
                    error = ValidationError(error.message, field=output.error_field)
            end = self._close(entry, output.state, output.finish_reason, error, at)
        self._updates.append(
            RequestUpdate(
                output.request_id,
                output.new_token_ids,
                end,
                output.logprobs,
                output.sample_index,
                reason,
                output.matched_stop,
                entry.prompt_logprobs(output) if entry.owes_prompt_logprobs else None,
                at,
                output.end_token,
            )
        )

    def note_loss(self, request_id: int) -> int:
        """Count a plane that was lost while it computed a request; its `num_vain_losses`."""
        entry = self._open.get(request_id)
        if entry is None:
            return 0
        entry.note_loss()
        return entry.num_vain_losses

    def num_vain_losses(self, request_id: int) -> int:
        """Return how often planes were lost with it since its last token; 0: it is not here."""
        entry = self._open.get(request_id)
        return 0 if entry is None or entry.has_got_on else entry.num_vain_losses

    def is_open(self, request_id: int) -> bool:
        """Whether a request is admitted and has not ended."""
        return request_id in self._open

    def least_suspect(self) -> int | None:
        """Return the request with which planes were lost least, the newest of several."""
        ids = reversed(self._open)
        return min(ids, key=self.num_vain_losses, default=None)

    def fail(self, request_id: int, error: EngineError) -> None:
        """End a request that the scheduler has been told to forget."""
        entry, now = self._open[request_id], self._clock()
        end = self._close(entry, RequestState.FAILED, FinishReason.ERROR, error, now)
        self._updates.append(RequestUpdate(request_id, end=end))

    def list_requests(self, *, include_ended: bool) -> list[RequestInfo]:
        """Return the requests under way, oldest first, after those that ended last if wanted."""
        now = self._clock()
        infos = list(self._ended) if include_ended else []
        infos.extend(
            _describe(entry.request, tuple(entry.request.history), now, entry.request.state)
            for entry in self._open.values()
        )
        return infos

    def _close(
        self,
        entry: Entry,
        state: RequestState,
        reason: FinishReason | None,
        error: EngineError | None,
        now: float,
    ) -> RequestEnd:
        request, tally = entry.request, self._tally
        del self._open[request.id]
        arrival = request.arrival_time
        started, first = entry.first_step_at, entry.first_token_at
        timings = RequestTimings(
            queue_s=None if started is None else started - arrival,
            time_to_first_token_s=None if first is None else first - arrival,
            total_s=now - arrival,
        )
        if state is RequestState.COMPLETED:
            tally.completed_requests += 1
            tally.latency_sum_s += timings.total_s
            # That of the last sample to end is the news; the request's is that of its first.
            reason = request.finish_reason or reason
        elif state is RequestState.FAILED:
            tally.failed_requests += 1
        else:
            tally.cancelled_requests += 1
        history = _ending_in(tuple(request.history), state)
        reason = reason or FinishReason.ERROR
        self._ended.append(_describe(request, history, now, state, reason))
        embedding = request.embedding
        return RequestEnd(
            state,
            reason,
            timings,
            error,
            request.cached_tokens,
            history,
            embedding.pooled if embedding and state is RequestState.COMPLETED else None,
        )

    def metrics(self, stats: SchedulerStats, *, memory_utilization: float) -> EngineMetrics:
        """Close the account of the turn and sum up."""
        now, tally = self._clock(), self._tally
        if self._was_busy:
            tally.busy_s += now - self._counted_until
        self._counted_until = now
        self._was_busy = bool(self._open)
        return EngineMetrics(
            total_requests=tally.total_requests,
            completed_requests=tally.completed_requests,
            failed_requests=tally.failed_requests,
            cancelled_requests=tally.cancelled_requests,
            prompt_tokens=tally.prompt_tokens,
            generated_tokens=tally.generated_tokens,
            active_sequences=stats.num_running,
            waiting_requests=stats.num_queued_requests,
            num_preemptions=stats.num_preemptions,
            num_swaps=stats.num_swaps,
            cached_tokens=tally.cached_tokens,
            memory_utilization=memory_utilization,
            average_latency_s=tally.average_latency_s,
            tokens_per_second=tally.tokens_per_second,
            num_steps=stats.num_steps,
            num_drafts=stats.num_drafts,
            num_kept_drafts=stats.num_kept_drafts,
            num_kept_states=stats.num_kept_states,
            num_state_hits=stats.num_state_hits,
        )


def _ending_in(history: tuple[StateChange, ...], state: RequestState) -> tuple[StateChange, ...]:
    """Return the history with this end: what the engine fails, its scheduler calls cancelled."""
    if not history or not history[-1].state.is_final:
        return history
    return (*history[:-1], history[-1]._replace(state=state))


def _describe(
    request: Request,
    history: tuple[StateChange, ...],
    now: float,
    state: RequestState,
    finish_reason: FinishReason | None = None,
) -> RequestInfo:
    """Describe a request; `state`: where its scheduler, a user's own, notes no history."""
    outputs = [sample.output_tokens for sample in request.samples] or [request.output_tokens]
    return RequestInfo(
        request_id=request.id,
        name=request.name,
        state=history[-1].state if history else state,
        priority=request.priority,
        prompt_tokens=len(request.input_tokens),
        cached_tokens=request.cached_tokens,
        generated_tokens=tuple(map(len, outputs)),
        arrival_time=request.arrival_time,
        age_s=now - request.arrival_time,
        history=history,
        finish_reason=finish_reason,
        adapter=request.adapter,
    )
