"""The scheduler against a model of the compute plane, under any mix of events.

The model keeps slots exactly as `compute.proto` says and a pool in which "KV" is the token id
itself. The next token is a hash of what is read *through the block table*, so one wrong block,
position or slot changes the output, and every output is compared with the request run alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from control_plane.core.batch import StepResult
from control_plane.core.errors import RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import (
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from planes.errors import ValidationError
from tests.properties.model_plane import EOS, VOCABULARY, ModelPlane, run_alone


@dataclass
class Sent:
    output: SchedulerOutput
    result: StepResult
    written: set[int]


@dataclass
class World:
    """A scheduler, its model plane, and the promises made to every request."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    in_flight: deque[Sent] = field(default_factory=deque)
    requests: list[Request] = field(default_factory=list)  # in order of arrival
    received: dict[int, list[int]] = field(default_factory=dict)
    final: dict[int, RequestOutput] = field(default_factory=dict)
    steps_without_prefill: int = 0

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(self.config, self.kv)
        self.plane = ModelPlane(self.num_blocks, self.block_size, self.config.num_slots)

    def submit(self, prompt: list[int], max_tokens: int, *, ignore_eos: bool) -> None:
        request = Request(
            id=7 + 3 * len(self.requests),
            input_tokens=prompt,
            params=GenerationParams(
                max_tokens=max_tokens, seed=len(self.requests), ignore_eos=ignore_eos
            ),
            eos_token_ids=EOS,
        )
        total = len(prompt) + max_tokens
        if total > self.config.max_model_len:
            with pytest.raises(ValidationError):
                self.scheduler.add_request(request)
        elif -(-(total - 1) // self.block_size) > self.num_blocks:
            with pytest.raises(RequestNeverFitsError):
                self.scheduler.add_request(request)
        else:
            self.scheduler.add_request(request)
            self.requests.append(request)
            self.received[request.id] = []

    def send(self, *, fail_row: int | None = None, refuse: bool = False) -> bool:
        """Schedule and send one step; whether there was one."""
        could_decode = self.decode_ready()
        output = self.scheduler.schedule()
        if output is None:
            assert self.in_flight or not self.scheduler.has_pending_work(), "stuck"
            return False
        self.check_output(output, could_decode)
        result, written, given = self.plane.execute(output.batch, fail_row=fail_row, refuse=refuse)
        # A step in flight may still write its blocks: nobody else may have got them.
        for sent in self.in_flight:
            assert not given & sent.written
        self.in_flight.append(Sent(output, result, written))
        return True

    def commit(self) -> None:
        sent = self.in_flight.popleft()
        for event in self.scheduler.commit(sent.result):
            self.take(event)
        if sent.result.refusal is not None:
            self.lose_epoch(sent.output.batch.step_id)

    def lose_epoch(self, last_step: int) -> None:
        """Open a new session, with nothing in it."""
        self.in_flight.clear()
        self.scheduler.lose_epoch(last_step)
        self.plane = ModelPlane(self.num_blocks, self.block_size, self.config.num_slots, last_step)
        assert self.kv.get_memory_stats().used_blocks == 0

    def take(self, event: RequestOutput) -> None:
        assert event.request_id not in self.final, "a final event comes once"
        self.received[event.request_id].extend(event.new_token_ids)
        if event.state.is_final:
            self.final[event.request_id] = event
        else:
            assert event.new_token_ids

    def decode_ready(self) -> set[int]:
        """Ids of requests whose next row needs no block and computes the newest token only."""
        by_seed = {request.params.seed: request for request in self.requests}
        ready = set()
        for slot in self.plane.slots.values():
            request = by_seed[slot.params.seed]
            if (
                not request.state.is_final
                and slot.num_computed == len(slot.tokens) - 1
                and slot.num_computed % self.block_size != 0
                and len(slot.tokens) > request.num_prompt_tokens
                and len(slot.tokens) < request.max_total_len
            ):
                ready.add(request.id)
        return ready

    def check_output(self, output: SchedulerOutput, could_decode: set[int]) -> None:
        batch, config = output.batch, self.config
        row_ids = output.decode_request_ids + output.prefill_request_ids
        assert len(row_ids) == batch.num_rows == len(set(row_ids))
        assert 1 <= batch.num_rows <= config.max_batch_size
        assert batch.num_tokens <= config.max_total_tokens
        if config.max_prefill_tokens is not None:
            num_decodes = len(output.decode_request_ids)
            assert batch.num_tokens - num_decodes <= config.max_prefill_tokens
        assert self.scheduler.get_stats().num_running <= config.num_slots
        assert batch.query_lens[: len(output.decode_request_ids)] == [1] * len(
            output.decode_request_ids
        )
        # First come, first served: nobody is started past one who waits.
        waiting = [r.params.seed for r in self.requests if r.state is RequestState.PENDING]
        for start in batch.starts:
            assert start.params.seed < min(waiting, default=len(self.requests))
        # Decodes first, unless prompts have waited long; only where memory plays no part.
        is_calm = self.scheduler.get_stats().num_preemptions == 0 and not self.plane.has_refused
        if output.prefill_request_ids:
            if is_calm and could_decode - set(row_ids):
                assert self.steps_without_prefill >= config.prefill_patience
            self.steps_without_prefill = 0
        elif any(not r.state.is_final for r in self.requests):
            self.steps_without_prefill += 1

    def check_invariants(self) -> None:
        self.kv.check_invariants()
        stats = self.scheduler.get_stats()
        memory = self.kv.get_memory_stats()
        assert memory.num_sequences == stats.num_running
        assert (memory.used_blocks == 0) == (stats.num_running == 0)
        assert stats.num_in_flight == len(self.in_flight)
        live = [r for r in self.requests if not r.state.is_final]
        assert stats.num_waiting == sum(r.state is RequestState.PENDING for r in live)
        for request in self.requests:
            assert request.state.is_final == (request.id in self.final)
            assert request.output_tokens == self.received[request.id]

    def finish(self, *, depth: int) -> None:
        """Run until nothing is left, in a bounded number of steps; compare with alone."""
        work = sum(r.max_total_len for r in self.requests)
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
            self.compare_with_alone(request)
        self.check_no_slot_is_left()

    def compare_with_alone(self, request: Request) -> None:
        tokens, reason = run_alone(request)
        event = self.final[request.id]
        assert (event.state, event.finish_reason) == (request.state, request.finish_reason)
        if event.state is RequestState.COMPLETED:
            assert (self.received[request.id], event.finish_reason) == (tokens, reason)
        else:
            assert self.received[request.id] == tokens[: len(self.received[request.id])]

    def check_no_slot_is_left(self) -> None:
        """One more request, and the plane knows no slot but its own."""
        self.submit([1], 1, ignore_eos=True)
        while self.scheduler.has_pending_work():
            self.send()
            assert len(self.plane.slots) == 1
            self.commit()


# Sizes at which a handful of requests press on every limit: drawn from lists, because drawn from
# ranges most would be too small for two requests to meet.
any_limits = st.builds(
    SchedulerConfig,
    max_batch_size=st.sampled_from([4, 8, 2, 1]),
    max_num_seqs=st.sampled_from([6, 3, 1]),
    max_model_len=st.sampled_from([40, 14]),
    max_total_tokens=st.sampled_from([16, 5, 64, 3, 1]),
    max_prefill_tokens=st.sampled_from([None, 1, 4]),
    memory_threshold=st.sampled_from([1.0, 0.9, 0.5]),
    max_slots=st.sampled_from([None, 8, 2]),
    prefill_patience=st.sampled_from([3, 1]),
)
memory_is_the_limit = st.builds(
    SchedulerConfig,
    max_batch_size=st.sampled_from([8, 3]),
    max_total_tokens=st.sampled_from([64, 7]),
    memory_threshold=st.just(1.0),
)
configs = memory_is_the_limit | any_limits
pool_sizes = st.sampled_from([(8, 2), (16, 1), (6, 3), (5, 4), (14, 2)])
prompts = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6)
lengths = st.sampled_from([10, 7, 9, 3, 1])


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submit, cancel, send, commit, row failure, refusal and epoch loss."""

    @initialize(config=configs, pool_size=pool_sizes)
    def make(self, config, pool_size):
        self.world = World(config, *pool_size)

    @rule(batch=st.lists(st.tuples(prompts, lengths, st.booleans()), min_size=1, max_size=4))
    def submit(self, batch):
        for prompt, max_tokens, ignore_eos in batch:
            self.world.submit(prompt, max_tokens, ignore_eos=ignore_eos)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.world.requests))
        was_final = request.state.is_final
        event = self.world.scheduler.cancel(request.id)
        assert (event is None) == was_final
        if event is not None:
            assert event.state is RequestState.CANCELLED
            self.world.take(event)

    @precondition(lambda self: len(self.world.in_flight) < 2)
    @rule()
    def send(self):
        self.world.send()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def commit(self):
        self.world.commit()

    @rule(num_steps=st.integers(1, 8), depth=st.sampled_from([2, 1]))
    def run_steps(self, num_steps, depth):
        for _ in range(num_steps):
            while len(self.world.in_flight) < depth and self.world.send():
                pass
            if self.world.in_flight:
                self.world.commit()

    @precondition(lambda self: len(self.world.in_flight) < 2)
    @rule(row=st.integers(0, 3))
    def send_with_a_failing_row(self, row):
        self.world.send(fail_row=row)

    @precondition(lambda self: len(self.world.in_flight) < 2)
    @rule()
    def send_and_have_it_refused(self):
        self.world.send(refuse=True)

    @rule(last_step=st.integers(0, 1000))
    def lose_epoch(self, last_step):
        self.world.lose_epoch(last_step)

    @invariant()
    def every_promise_holds(self):
        if hasattr(self, "world"):
            self.world.check_invariants()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish(depth=2)


def test_any_mix_of_events_leaves_every_output_as_if_alone():
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=400, stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
def test_any_long_mix_of_events_leaves_every_output_as_if_alone():
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=4000,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@settings(max_examples=300, deadline=None)
@given(
    config=configs,
    pool_size=pool_sizes,
    depth=st.sampled_from([2, 1, 3]),
    arrivals=st.lists(st.tuples(st.integers(0, 3), prompts, lengths), min_size=4, max_size=9),
)
def test_requests_that_arrive_at_any_time_in_a_small_pool_get_what_they_get_alone(
    config, pool_size, depth, arrivals
):
    world = World(config, *pool_size)
    for num_steps, prompt, max_tokens in arrivals:
        for _ in range(num_steps):
            while len(world.in_flight) < depth and world.send():
                pass
            if world.in_flight:
                world.commit()
            world.check_invariants()
        world.submit(prompt, max_tokens, ignore_eos=True)
    world.finish(depth=depth)
    note(f"preemptions: {world.scheduler.get_stats().num_preemptions}")


@pytest.mark.parametrize("depth", [1, 2])
def test_two_requests_that_fit_only_one_at_a_time_both_get_what_they_get_alone(depth):
    world = World(SchedulerConfig(memory_threshold=1.0), num_blocks=4, block_size=4)
    for _ in range(2):
        world.submit([1, 2, 3, 4], 12, ignore_eos=True)
    world.finish(depth=depth)
    assert world.scheduler.get_stats().num_preemptions >= 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_decoding", [2, 3])
def test_newcomers_do_not_keep_taking_the_block_that_a_decode_row_waits_for(depth, num_decoding):
    # One token a step, and prompts that are owed every second one: a newcomer took the free block,
    # gave it back to the decode row it belongs to, and took it again.
    config = SchedulerConfig(
        max_batch_size=3, max_num_seqs=6, max_model_len=40, max_total_tokens=1,
        memory_threshold=1.0, prefill_patience=1,
    )  # fmt: skip
    world = World(config, 2 * num_decoding + 1, 4)
    for number in range(2 * num_decoding + 2):
        world.submit([1 + number % 9] * (3 + number % 2), 10 - number % 2, ignore_eos=True)
    world.finish(depth=depth)
