"""The requests of the scheduler: how they come in, fork, and end."""

from __future__ import annotations

from collections.abc import Iterable
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


class RequestTable:
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
        if child.adapter != group.request.adapter:
            raise SchedulerError("a fork has the adapter of its parent")
        if group.request.constraints or child.constraints:
            raise SchedulerError("a constrained request is not forked")
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

    def adopt(self, request: Request) -> int:
        """Queue a request that another scheduler had; see `Scheduler.adopt`."""
        if not request.history:
            raise SchedulerError(f"request {request.id} was in no scheduler before")
        self._check(request)
        search = request.search or self._search(request)
        group = self._enrol(request, search)
        if search is not None:
            for index, beam in enumerate(search.beams):
                seq = self.sequence(group, index)
                seq.output_tokens.extend(beam.tokens)
                group.beams.append(seq)
        elif any(sample.output_tokens or sample.finish_reason for sample in request.samples):
            for index, sample in enumerate(request.samples):
                if sample.finish_reason is None:
                    self.sequence(group, index)
        else:
            self.sequence(group, 0)
            group.unborn.extend(range(1, request.params.n))
        has_run = len(request.history) > 1
        for seq in group.sequences:
            seq.was_admitted = has_run
            self._queue.add(seq)
        return request.id

    def _open(self, request: Request) -> Group:
        """Check a new request and make its first sequence."""
        self._check(request)
        search = self._search(request)
        if request.embedding is None and len(request.output_tokens) >= request.max_tokens:
            raise SchedulerError(f"request {request.id} has all its {request.max_tokens} tokens")
        num_samples = request.params.n
        request.samples = [
            Sample(request.output_tokens),
            *(Sample() for _ in range(1, num_samples)),
        ]
        request.history = [StateChange(RequestState.PENDING, request.arrival_time)]
        group = self._enrol(request, search)
        seq = self.sequence(group, 0)
        if search is None:
            group.unborn.extend(range(1, num_samples))
        else:
            group.beams.append(seq)
        return group

    def _check(self, request: Request) -> None:
        """Refuse a request that does not fit, or is not one to queue."""
        width = request.params.beam_width
        self._limits.check(request.num_prompt_tokens, request.max_tokens, width or 1)
        if width is not None:
            self._limits.check_beams(width, len(request.end_token_ids))
        if request.state is not RequestState.PENDING:
            raise SchedulerError(f"request {request.id} is {request.state.value}, not pending")
        if request.id in self._groups:
            raise SchedulerError(f"request {request.id} is known already")
        if request.constraints and len(request.constraints) != request.params.n:
            raise SchedulerError(
                f"request {request.id} has {len(request.constraints)} constraints, it needs one "
                f"for each of its {request.params.n} samples"
            )

    def _enrol(self, request: Request, search: BeamSearch | None) -> Group:
        """Enter a request under numbers of its own; it has no sequences yet."""
        params = request.params
        first_seq_id = self._num_arrivals + 1
        self._num_arrivals += max(params.n, params.beam_width or 1)
        request.search = search
        group = Group(request, params, first_seq_id, search)
        if search is not None:
            group.params = replace(
                params, temperature=0.0, num_logprobs=search.num_candidates, n=1, beam_width=None
            )
        self._groups[request.id] = group
        return group

    def _search(self, request: Request) -> BeamSearch | None:
        """Return the beam search the request asks for, if it does."""
        params, width = request.params, request.params.beam_width
        if width is None:
            return None
        if request.output_tokens:
            raise SchedulerError(f"request {request.id} begins a beam search with tokens")
        return BeamSearch(
            width,
            params.max_tokens,
            request.end_token_ids,
            params.length_penalty,
            params.early_stopping,
        )

    def sequence(self, group: Group, index: int) -> Sequence:
        """Make the sequence of sample or beam `index`."""
        seq = Sequence(group.first_seq_id + index, group.request, group, index)
        group.sequences.append(seq)
        return seq

    # Out

    def withdraw(self, request_ids: Iterable[int] | None) -> list[Request]:
        """Let go of requests that hold nothing; see `Scheduler.withdraw`."""
        ids = list(self._groups) if request_ids is None else request_ids
        found = [self._groups[request_id] for request_id in ids if request_id in self._groups]
        groups = [group for group in found if group.num_running == 0]
        groups.sort(key=lambda group: group.sequences[0].order)
        for group in groups:
            for seq in group.sequences:
                self._queue.remove(seq)
                self._running.host.forget(seq.seq_id)
            group.sequences.clear()
            if group.request.state is not RequestState.PENDING:  # a sample that ended ran last
                group.request.enter(RequestState.PENDING, self._running.now)
            del self._groups[group.request.id]
        return [group.request for group in groups]

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request; its final event, or None if it is unknown or has ended."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        return self.end(group, RequestState.CANCELLED)

    def finish(self, seq: Sequence, reason: FinishReason) -> RequestOutput:
        """End one running sample, and its request if it was the last; the event that says so."""
        self._leave(seq)
        return self._note_end(seq, reason)

    def _note_end(self, seq: Sequence, reason: FinishReason) -> RequestOutput:
        """Take a sample that has ended off its request; the event."""
        group, request = seq.group, seq.request
        request.samples[seq.sample_index].finish_reason = reason
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

    def end_sample(
        self, request_id: int, sample_index: int, num_tokens: int
    ) -> RequestOutput | None:
        """End one sample with its first tokens; see `Scheduler.end_sample`."""
        group = self._groups.get(request_id)
        if group is None or group.search is not None:
            return None
        for seq in group.sequences:
            if seq.sample_index == sample_index:
                break
        else:
            return None
        for twin in self.bear(group):  # nobody else would, without it
            self._queue.add(twin)
        # The sequence keeps all: its blocks are still to be filed under what they hold.
        kept = seq.output_tokens[:num_tokens]
        group.request.samples[sample_index].output_tokens = kept
        if sample_index == 0:
            group.request.output_tokens = kept
        if seq in self._queue:
            self._queue.remove(seq)
            self._running.host.forget(seq.seq_id)
            seq.is_done = True
            return self._note_end(seq, FinishReason.STOP)
        event = self.finish(seq, FinishReason.STOP)
        if seq.num_in_flight == 0:
            self._running.release(seq)
        return event

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

    def end(
        self,
        group: Group,
        state: RequestState,
        error: str | None = None,
        error_field: str | None = None,
    ) -> RequestOutput:
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
        return RequestOutput(request.id, (), state, reason, error, error_field=error_field)

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
