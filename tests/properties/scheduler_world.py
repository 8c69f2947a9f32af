"""A scheduler, its model plane, and the promises made to every request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from control_plane.core.batch import StepResult
from control_plane.core.errors import RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import (
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from control_plane.core.token_masks import all_but
from planes.errors import SchedulerError, ValidationError
from tests.properties.model_plane import ModelPlane
from tests.properties.state_plane import StatePlane
from tests.properties.toy_constraint import VOCABULARY, Rule, ToyConstraint
from tests.properties.toy_model import EOS, run_alone, search_alone

ALLOWED_CHANGES = {
    RequestState.PENDING: {"prefill", "cancelled", "failed"},
    RequestState.PREFILL: {"decode", "pending", "completed", "cancelled", "failed"},
    RequestState.DECODE: {"pending", "completed", "cancelled", "failed"},
}


@dataclass(frozen=True)
class Memory:
    """Pools and what is shared in them."""

    num_blocks: int
    block_size: int
    prefix_cache: bool = False
    roles_matter: bool = True
    num_host_blocks: int = 0


@dataclass(frozen=True)
class Sent:
    output: SchedulerOutput
    result: StepResult
    written: set[int]


@dataclass
class World:
    config: SchedulerConfig
    memory: Memory
    in_flight: deque[Sent] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)  # in order of arrival
    given: dict[int, tuple[int, ...]] = field(default_factory=dict)  # output that a fork began with
    received: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finished: dict[tuple[int, int], RequestOutput] = field(default_factory=dict)
    final: dict[int, RequestOutput] = field(default_factory=dict)
    stopped: set[tuple[int, int]] = field(default_factory=set)  # samples ended from outside
    faulted: set[int] = field(default_factory=set)
    steps_without_prefill: int = 0
    has_forked: bool = False
    now: float = 0.0

    def __post_init__(self) -> None:
        memory = self.memory
        self.kv = KVCacheManager(
            memory.num_blocks,
            memory.block_size,
            prefix_cache=memory.prefix_cache,
            roles_matter=memory.roles_matter,
        )
        self.scheduler = Scheduler(self.config, self.kv)
        self.salts: dict[int | None, str] = {}
        self.rules: dict[int | None, Rule] = {}
        self.plane = self.new_plane(0)

    @property
    def plane_class(self) -> type[ModelPlane]:
        return StatePlane if self.config.num_states else ModelPlane

    def new_plane(self, last_step: int) -> ModelPlane:
        plane = self.plane_class(
            self.memory.num_blocks,
            self.memory.block_size,
            self.config.num_slots,
            self.config.num_host_blocks,
            last_step,
            self.salts.__getitem__,
            self.memory.roles_matter,
            self.rules,
        )
        if isinstance(plane, StatePlane):
            plane.num_states = self.config.num_states
        return plane

    # --- what befalls it ---

    def make(self, prompt: list[int], max_tokens: int, **options: object) -> Request:
        number = self.next_number()
        width = options.pop("beam_width", None)
        min_tokens = int(str(options.pop("min_tokens", 0))) * (width is None)
        ignore_eos = bool(options.pop("ignore_eos", min_tokens == 0))
        n = int(str(options.pop("n", 1)))
        is_constrained = bool(options.pop("constrained", False)) and width is None
        if is_constrained:
            options["constraints"] = tuple(ToyConstraint(number) for _ in range(n))
        if width is not None:
            n = min(n, int(str(width)))
        self.salts[number] = str(options.get("cache_salt", ""))
        request = Request(
            id=7 + 3 * number,
            input_tokens=prompt,
            params=GenerationParams(
                max_tokens=max_tokens,
                seed=number,
                ignore_eos=ignore_eos,
                n=n,
                beam_width=width,  # type: ignore[arg-type]
                early_stopping=bool(number % 2),
                min_tokens=min(min_tokens, max_tokens),
            ),
            eos_token_ids=EOS,
            arrival_time=self.now,
            **options,  # type: ignore[arg-type]
        )
        self.know(request)
        return request

    def know(self, request: Request) -> None:
        """Note what its samples may say, as the admission would and as the plane will be told."""
        ends = request.end_token_ids
        if request.params.min_tokens > len(request.output_tokens) and ends:
            request.open_tokens = all_but(ends, VOCABULARY)
        self.rules[request.params.seed] = Rule.of(request)

    def next_number(self) -> int:
        return len(self.requests)

    def submit(self, prompt: list[int], max_tokens: int, **options: object) -> Request | None:
        request = self.make(prompt, max_tokens, **options)
        total = len(prompt) + max_tokens
        width = request.params.beam_width or 1
        if total > self.config.max_model_len:
            with pytest.raises(ValidationError):
                self.scheduler.add_request(request)
        elif self.blocks_of(request) > self.memory.num_blocks:
            with pytest.raises(RequestNeverFitsError):
                self.scheduler.add_request(request)
        elif width > self.config.num_slots:
            with pytest.raises(ValidationError, match="beam_width must be at most"):
                self.scheduler.add_request(request)
        else:
            self.scheduler.add_request(request)
            self._expect(request, ())
            return request
        return None

    def blocks_of(self, request: Request) -> int:
        """What the request needs alone: its prompt's full blocks once, the rest for each beam.

        Where there are states, all for each beam.
        """
        num_each = -(-(request.max_total_len - 1) // self.memory.block_size)
        num_shared = request.num_prompt_tokens // self.memory.block_size
        num_shared *= self.config.num_states == 0
        return num_shared + (num_each - num_shared) * (request.params.beam_width or 1)

    def fork(self, parent: Request, max_tokens: int) -> None:
        child = self.make(list(parent.input_tokens), max_tokens, cache_salt=parent.cache_salt)
        given = tuple(parent.output_tokens)
        total = child.max_total_len
        fits = -(-(total - 1) // self.memory.block_size) <= self.memory.num_blocks
        if (
            parent.state.is_final
            or parent.params.n > 1
            or parent.params.beam_width is not None
            or parent.constraints
            or len(given) >= max_tokens
            or total > self.config.max_model_len
            or not fits
        ):
            with pytest.raises((SchedulerError, ValidationError, RequestNeverFitsError)):
                self.scheduler.fork(parent.id, child)
        else:
            self.has_forked = True
            self.scheduler.fork(parent.id, child)
            self._expect(child, given)

    def _expect(self, request: Request, given: tuple[int, ...]) -> None:
        self.requests.append(request)
        self.given[request.id] = given
        for index in range(request.params.n):
            self.received[request.id, index] = list(given)

    def cancel(self, request: Request) -> None:
        was_final = request.state.is_final
        event = self.scheduler.cancel(request.id, self.now)
        assert (event is None) == was_final
        if event is not None:
            assert event.state is RequestState.CANCELLED
            self.take(event)

    def end_sample(self, request: Request, index: int, num_tokens: int) -> None:
        """Let a sample have stopped after some of its tokens."""
        sample = request.id, index
        num_tokens = min(num_tokens, len(self.received[sample]))
        has_ended = request.state.is_final or sample in self.finished
        event = self.scheduler.end_sample(request.id, index, num_tokens, self.now)
        if event is None:
            is_unborn = not self.received[sample]
            assert has_ended or is_unborn or request.params.beam_width is not None
            return
        assert not has_ended
        assert event.finish_reason is FinishReason.STOP
        del self.received[sample][num_tokens:]
        self.stopped.add(sample)
        self.take(event)

    def send(self, *, fail_row: int | None = None, refuse: bool = False) -> bool:
        """Schedule and send one step; whether there was one."""
        could_decode = self.decode_ready()
        output = self.scheduler.schedule(self.now)
        if output is None:
            assert self.in_flight or not self.scheduler.has_pending_work(), "stuck"
            return False
        self.check_output(output, could_decode)
        ids = output.decode_request_ids + output.prefill_request_ids
        if refuse:
            self.faulted.update(ids)
        elif fail_row is not None and fail_row < len(ids):
            self.faulted.add(ids[fail_row])
        result, written = self.plane.execute(output.batch, fail_row=fail_row, refuse=refuse)
        if result.refusal is not None:
            self.faulted.update(ids)
        self.in_flight.append(Sent(output, result, written))
        return True

    def commit(self) -> None:
        sent = self.in_flight.popleft()
        for event in self.scheduler.commit(sent.result, self.now):
            self.take(event)
        if sent.result.refusal is not None:
            self.lose_epoch(sent.output.batch.step_id)

    def lose_epoch(self, last_step: int) -> None:
        """Open a new session, with nothing in it."""
        self.in_flight.clear()
        self.scheduler.lose_epoch(last_step)
        self.plane = self.new_plane(last_step)
        stats = self.kv.get_memory_stats()
        assert (stats.used_blocks, stats.cached_blocks) == (0, 0)
        assert self.scheduler.get_stats().num_host_blocks_used == 0
        assert self.scheduler.get_stats().num_kept_states == 0

    def run_steps(self, num_steps: int, depth: int) -> None:
        for _ in range(num_steps):
            while len(self.in_flight) < depth and self.send():
                pass
            if self.in_flight:
                self.commit()

    def take(self, event: RequestOutput) -> None:
        assert event.request_id not in self.final, "a final event comes once, and last"
        sample = event.request_id, event.sample_index
        if event.state in (RequestState.CANCELLED, RequestState.FAILED):  # of all its samples
            assert not event.new_token_ids
            self.final[event.request_id] = event
            return
        assert sample not in self.finished, "a sample ends once"
        self.received[sample].extend(event.new_token_ids)
        assert event.new_token_ids or event.finish_reason is not None
        if event.finish_reason is not None:
            self.finished[sample] = event
        if event.state.is_final:
            self.final[event.request_id] = event

    # --- what must hold ---

    def decode_ready(self) -> set[int]:
        """Slots whose next row needs no block and computes the newest token only."""
        by_seed = {request.params.seed: request for request in self.requests}
        ready = set()
        for number, slot in self.plane.slots.items():
            request = by_seed[slot.params.seed]
            if (
                not request.state.is_final
                and slot.num_computed == len(slot.tokens) - 1
                and slot.num_computed % self.memory.block_size != 0
                and len(slot.tokens) > request.num_prompt_tokens
                and len(slot.tokens) < request.max_total_len
            ):
                ready.add(number)
        return ready

    def check_output(self, output: SchedulerOutput, could_decode: set[int]) -> None:
        batch, config = output.batch, self.config
        row_ids = output.decode_request_ids + output.prefill_request_ids
        num_decodes = len(output.decode_request_ids)
        num_drafts = batch.draft_counts or [0] * batch.num_rows
        assert len(row_ids) == batch.num_rows
        assert batch.num_rows >= 1 or batch.starts
        assert config.num_states or not batch.state_copies
        num_places = max(batch.num_rows, len(batch.sampled_rows)) + sum(num_drafts)
        assert num_places <= config.max_batch_size
        assert batch.num_tokens <= config.max_total_tokens
        if config.max_prefill_tokens is not None:
            num_prefill_tokens = batch.num_tokens - num_decodes - sum(num_drafts)
            assert num_prefill_tokens <= config.max_prefill_tokens
        assert self.scheduler.get_stats().num_running <= config.num_slots
        assert batch.query_lens[:num_decodes] == [1 + count for count in num_drafts[:num_decodes]]
        assert not any(num_drafts) or not output.prefill_request_ids
        most = {row: config.grammar_drafts for row, *_ in batch.constraints}
        for row, count in enumerate(num_drafts):
            assert count <= most.get(row, config.speculative_tokens)
        self.check_order(output)
        # Decodes first, unless prompts have waited long; only where memory plays no part, and no
        # decode row waits for its own newest token.
        is_calm = self.scheduler.get_stats().num_preemptions == 0 and not self.plane.has_refused
        is_simple = not self.has_forked and all(
            r.params.n == 1 and r.params.beam_width is None and not r.constraints
            for r in self.requests
        )
        if output.prefill_request_ids:
            if is_calm and is_simple and could_decode - set(batch.slots):
                assert self.steps_without_prefill >= config.prefill_patience
            self.steps_without_prefill = 0
        elif any(not r.state.is_final for r in self.requests):
            self.steps_without_prefill += 1

    def check_order(self, output: SchedulerOutput) -> None:
        """Nobody is admitted past one who waits and comes before by priority and arrival."""
        batch = output.batch
        order = {r.id: (r.priority, number) for number, r in enumerate(self.requests)}
        waiting = [order[r.id] for r in self.requests if r.state is RequestState.PENDING]
        started = {start.slot for start in batch.starts}
        num_decodes = len(output.decode_request_ids)
        for slot, request_id in zip(
            batch.slots[num_decodes:], output.prefill_request_ids, strict=True
        ):
            if slot in started:
                assert order[request_id] < min(waiting, default=(99, 0))

    def check_invariants(self) -> None:
        self.kv.check_invariants()
        stats = self.scheduler.get_stats()
        memory = self.scheduler.get_memory_stats()
        assert memory.num_sequences == stats.num_running
        assert (memory.used_blocks == 0) == (stats.num_running == 0)
        assert memory.used_blocks + memory.free_blocks == memory.total_blocks
        assert 0 <= memory.cached_blocks <= memory.free_blocks
        assert 0 <= memory.internal_fragmentation < 1
        assert 0 <= stats.num_swaps <= stats.num_preemptions
        assert 0 <= stats.num_host_blocks_used <= self.config.num_host_blocks
        assert 0 <= stats.num_kept_states <= len(self.config.kept_states)
        assert stats.num_in_flight == len(self.in_flight)
        for request in self.requests:
            self.check_request(request)
        # Every sample has ended, runs, waits, or is to be born out of one that does.
        live = [r for r in self.requests if not r.state.is_final]
        assert stats.num_waiting <= sum(
            r.params.beam_width or sum(s.finish_reason is None for s in r.samples) for r in live
        )
        if all(r.params.n == 1 and r.params.beam_width is None for r in self.requests):
            assert stats.num_waiting == sum(r.state is RequestState.PENDING for r in live)

    def check_request(self, request: Request) -> None:
        assert request.state.is_final == (request.id in self.final)
        assert request.samples[0].output_tokens is request.output_tokens
        for index, sample in enumerate(request.samples):
            assert sample.output_tokens == self.received[request.id, index]
            if request.constraints and not request.state.is_final:
                told = request.constraints[index].output  # type: ignore[attr-defined]
                is_stopped = (request.id, index) in self.stopped
                has_ended = sample.finish_reason is not None
                assert told == sample.output_tokens or is_stopped or has_ended
                assert told == sample.output_tokens[: len(told)] or is_stopped
        history = request.history
        assert history[0].state is RequestState.PENDING
        assert history[-1].state is request.state
        assert history[0].at == request.arrival_time
        for before, after in pairwise(history):
            assert before.at <= after.at
            # A sample may be ended while it waits to go on.
            is_stopped = any((request.id, i) in self.stopped for i in range(request.params.n))
            allowed = ALLOWED_CHANGES[before.state] | ({"completed"} if is_stopped else set())
            assert after.state.value in allowed
        most = (request.num_prompt_tokens - 1) // self.memory.block_size * self.memory.block_size
        if self.given[request.id]:  # there is a token after the prompt
            most = request.num_prompt_tokens
        assert 0 <= request.cached_tokens <= most

    # --- the end ---

    def finish(self, *, depth: int) -> None:
        """Run until nothing is left, in a bounded number of steps; compare with alone."""
        work = sum(r.max_total_len * (r.params.beam_width or r.params.n) for r in self.requests)
        bound = 50 + 20 * work
        while self.scheduler.has_pending_work():
            bound -= 1
            assert bound > 0, "no progress"
            while len(self.in_flight) < depth and self.send():
                pass
            if self.in_flight:
                self.commit()
            self.check_invariants()
        assert not self.in_flight
        assert self.kv.get_memory_stats().used_blocks == 0
        assert self.scheduler.get_completed() == [
            r for e in self.final for r in self.requests if r.id == e
        ]
        for request in self.requests:
            for index in range(request.params.n):
                self.compare_with_alone(request, index)
        self.check_nothing_is_left()

    def compare_with_alone(self, request: Request, index: int) -> None:
        if request.params.beam_width is None:
            tokens, reason = run_alone(request, index, self.given[request.id])
        else:
            found = search_alone(request)[index]
            tokens = list(found.tokens)
            reason = FinishReason.STOP if found.has_ended else FinishReason.LENGTH
        event, received = self.final[request.id], self.received[request.id, index]
        assert event.state is request.state
        sample_reason = request.samples[index].finish_reason
        if (request.id, index) in self.stopped:
            assert received == tokens[: len(received)]
            assert sample_reason is FinishReason.STOP
        elif request.state is RequestState.COMPLETED:
            assert (received, sample_reason) == (tokens, reason)
        else:
            assert received == tokens[: len(received)]
            if request.state is RequestState.FAILED:
                is_own_fault = any(
                    run_alone(request, i)[1] is FinishReason.ERROR for i in range(request.params.n)
                )
                assert request.id in self.faulted or (request.constraints and is_own_fault), (
                    "nobody fails for what befell another"
                )

    def check_nothing_is_left(self) -> None:
        """One more request, and the plane knows no slot and no host block but its own."""
        self.submit([1], 1)
        while self.scheduler.has_pending_work():
            self.send()
            assert len(self.plane.slots) == 1
            self.commit()
        assert self.scheduler.get_stats().num_host_blocks_used == 0
