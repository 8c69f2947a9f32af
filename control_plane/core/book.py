"""The requests of the scheduler: how they come in, fork, and end."""

from __future__ import annotations

from dataclasses import replace

from control_plane.core.beam import BeamSearch, Hypothesis
from control_plane.core.interface import RequestOutput
from control_plane.core.limits import RequestLimits
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import (
    FinishReason,
    Group,
    Request,
    RequestState,
    Sample,
    Sequence,
    StateChange,
)
from control_plane.core.running import RunningSet
from planes.errors import SchedulerError

_REASONS = {
    RequestState.CANCELLED: FinishReason.CANCELLED,
    RequestState.FAILED: FinishReason.ERROR,
}


class Book:
    """Every request that has not ended, with its sequences; numbers them by arrival."""

    __slots__ = ("_completed", "_groups", "_limits", "_num_arrivals", "_queue", "_running")

    def __init__(self, limits: RequestLimits, queue: WaitingQueue, running: RunningSet) -> None:
        self._limits = limits
        self._queue = queue
        self._running = running
        self._groups: dict[int, Group] = {}  # by request id
        self._completed: list[Request] = []
        self._num_arrivals = 0

    # In

    def add(self, request: Request) -> int:
        """Queue a new request and return its id; see `Scheduler.add_request`."""
        group = self._open(request)
        self._queue.add(group.sequences[0])
        if request.output_tokens:  # its samples have parted already
            for twin in self.bear(group):
                self._queue.add(twin)
        return request.id

    def fork(self, parent_id: int, child: Request) -> int:
        """Add a request that goes on from the tokens another has; see `Scheduler.fork`."""
        group = self._groups.get(parent_id)
        if group is None:
            raise SchedulerError(f"request {parent_id} is unknown or has ended")
        if any(p.n > 1 or p.beam_width is not None for p in (group.request.params, child.params)):
            raise SchedulerError("only a request with one sample is forked, into one with one")
        if child.input_tokens != group.request.input_tokens:
            raise SchedulerError("a fork has the prompt of its parent")
        parent = group.sequences[0]
        child.output_tokens = list(parent.output_tokens)
        seq = self._open(child).sequences[0]
        num_shared = seq.num_known_tokens - 1  # the last token is always computed
        if (
            parent in self._running
            and not parent.discards
            and 0 < num_shared <= parent.num_computed_tokens
            and self._running.fork(parent, seq, num_shared) is not None
        ):
            if parent.chain is not None:
                seq.chain = parent.chain.fork(seq.output_tokens)
            self._running.decoding[seq.seq_id] = seq
        else:
            self._queue.add(seq)
        return child.id

    def bear(self, group: Group) -> list[Sequence]:
        """Make the sequences of a request's samples that have none."""
        twins = [self.sequence(group, index) for index in group.unborn]
        group.unborn.clear()
        return twins

    def _open(self, request: Request) -> Group:
        """Check a new request and make its first sequence."""
        num_samples, params = request.params.n, request.params
        num_beams = params.beam_width or 1
        self._limits.check(request.num_prompt_tokens, request.max_tokens, num_beams)
        search = self._search(request)
        if request.state is not RequestState.PENDING:
            raise SchedulerError(f"request {request.id} is {request.state.value}, not pending")
        if len(request.output_tokens) >= request.max_tokens:
            raise SchedulerError(f"request {request.id} has all its {request.max_tokens} tokens")
        if request.id in self._groups:
            raise SchedulerError(f"request {request.id} is known already")
        request.samples = [
            Sample(request.output_tokens),
            *(Sample() for _ in range(1, num_samples)),
        ]
        request.history = [StateChange(RequestState.PENDING, request.arrival_time)]
        first_seq_id = self._num_arrivals + 1
        self._num_arrivals += max(num_samples, num_beams)
        group = Group(request, params, first_seq_id, search)
        if search is None:
            group.unborn.extend(range(1, num_samples))
        else:
            group.params = replace(
                params, temperature=0.0, num_logprobs=search.num_candidates, n=1, beam_width=None
            )
        self._groups[request.id] = group
        seq = self.sequence(group, 0)
        if search is not None:
            group.beams.append(seq)
        return group

    def _search(self, request: Request) -> BeamSearch | None:
        """Return the beam search the request asks for; raises ValidationError."""
        params, width = request.params, request.params.beam_width
        if width is None:
            return None
        if request.output_tokens:
            raise SchedulerError(f"request {request.id} begins a beam search with tokens")
        end_token_ids = frozenset() if params.ignore_eos else request.eos_token_ids
        self._limits.check_beams(width, len(end_token_ids))
        return BeamSearch(
            width, params.max_tokens, end_token_ids, params.length_penalty, params.early_stopping
        )

    def sequence(self, group: Group, index: int) -> Sequence:
        """Make the sequence of sample or beam `index`."""
        seq = Sequence(group.first_seq_id + index, group.request, group, index)
        group.sequences.append(seq)
        return seq

    # Out

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its final event, or None if it is unknown or has ended."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        return self.end(group, RequestState.CANCELLED)

    def finish(self, seq: Sequence, reason: FinishReason) -> RequestOutput:
        """End one sample, and its request if it was the last; the event that says so."""
        group, request = seq.group, seq.request
        request.samples[seq.sample_index].finish_reason = reason
        self._leave(seq)
        group.sequences.remove(seq)
        if group.sequences or group.unborn:
            return RequestOutput(
                request.id, (), RequestState.DECODE, reason, sample_index=seq.sample_index
            )
        first_reason = request.samples[0].finish_reason
        self._close(request, RequestState.COMPLETED, first_reason)
        return RequestOutput(
            request.id, (), RequestState.COMPLETED, reason, sample_index=seq.sample_index
        )

    def drop(self, seq: Sequence) -> None:
        """Give up a sequence with nothing in flight, and what it holds."""
        self._leave(seq)
        self._running.release(seq)
        seq.group.sequences.remove(seq)

    def answer(self, group: Group, hypotheses: list[Hypothesis]) -> list[RequestOutput]:
        """End a request with the answers of its beam search, the best first; the events."""
        request = group.request
        for seq in list(group.sequences):
            self.drop(seq)
        events = []
        for index, sample in enumerate(request.samples):
            found = hypotheses[min(index, len(hypotheses) - 1)]
            sample.output_tokens.extend(found.tokens)
            has_ended = found.has_ended
            sample.finish_reason = FinishReason.STOP if has_ended else FinishReason.LENGTH
            is_last = index == len(request.samples) - 1
            if is_last:
                self._close(request, RequestState.COMPLETED, request.samples[0].finish_reason)
            events.append(
                RequestOutput(
                    request.id,
                    found.tokens,
                    RequestState.COMPLETED if is_last else RequestState.DECODE,
                    sample.finish_reason,
                    sample_index=index,
                )
            )
        return events

    def end(self, group: Group, state: RequestState, error: str | None = None) -> RequestOutput:
        """End a request as a whole, cancelled or failed; the event that says so."""
        request, reason = group.request, _REASONS[state]
        for sample in request.samples:
            sample.finish_reason = sample.finish_reason or reason
        for seq in group.sequences:
            if seq in self._queue:
                self._queue.remove(seq)
                self._running.host.forget(seq.seq_id)
                seq.is_done = True
            else:
                self._leave(seq)
                if seq.num_in_flight == 0:
                    self._running.release(seq)
        group.sequences.clear()
        group.unborn.clear()
        request.error = error
        self._close(request, state, reason)
        return RequestOutput(request.id, (), state, reason, error)

    def take_completed(self) -> list[Request]:
        """Return the requests that ended since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def _leave(self, seq: Sequence) -> None:
        """Let a running sequence go when its steps in flight have come."""
        seq.is_done = True
        self._running.drain(seq)

    def _close(self, request: Request, state: RequestState, reason: FinishReason | None) -> None:
        request.finish_reason = reason
        request.enter(state, self._running.now)
        del self._groups[request.id]
        self._completed.append(request)
