"""What must be true of a scheduler, of each of its steps, and of what every request gets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from control_plane.core.batch import StepResult
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import RequestOutput, Scheduler, SchedulerConfig, SchedulerOutput
from tests.properties.model_plane import ModelPlane
from tests.properties.state_plane import StatePlane
from tests.properties.toy_constraint import Rule
from tests.properties.toy_model import run_alone, search_alone

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
class Promises:
    """A scheduler, its model plane, and all that was asked of them and came back."""

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
        self.adapters: dict[int | None, int] = {}
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
            self.adapters,
        )
        if isinstance(plane, StatePlane):
            plane.num_states = self.config.num_states
        return plane

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
        assert not any(batch.wanted_drafts) or config.draft_model
        assert all(count <= config.speculative_tokens for count in batch.wanted_drafts)
        assert not any(batch.wanted_drafts) or not output.prefill_request_ids
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
                fills_rows = num_decodes >= config.max_batch_size - 1 >= config.prefill_patience
                gives_a_row = fills_rows and config.max_total_tokens >= config.max_batch_size
                assert gives_a_row or self.steps_without_prefill >= config.prefill_patience
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
