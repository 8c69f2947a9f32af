"""The scheduler against a model of the compute plane, under any mix of events.

The model keeps slots exactly as `compute.proto` says and a pool in which "KV" is the token id
itself. The next token is a hash of what is read *through the block table*, so one wrong block,
position or slot changes the output, and every output is compared with the request run alone.
"""

from __future__ import annotations

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

from control_plane.core import arrivals as waiting
from control_plane.core.scheduler import SchedulerConfig
from tests.properties.scheduler_promises import Memory
from tests.properties.scheduler_world import World
from tests.properties.toy_model import VOCABULARY

# Sizes at which a handful of requests press on every limit: drawn from lists, because drawn from
# ranges most would be too small for two requests to meet.
num_host_blocks = st.sampled_from([0, 0, 4, 12])
speculative_tokens = st.sampled_from([0, 3, 7, 1])
grammar_drafts = st.sampled_from([7, 0, 3, 1])
prompt_lookup_min = st.sampled_from([1, 2, 3])
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
    num_host_blocks=num_host_blocks,
    speculative_tokens=speculative_tokens,
    grammar_drafts=grammar_drafts,
    prompt_lookup_min=prompt_lookup_min,
    start_prefixes=st.booleans(),
    draft_model=st.booleans(),
)
memory_is_the_limit = st.builds(
    SchedulerConfig,
    max_batch_size=st.sampled_from([8, 3]),
    max_total_tokens=st.sampled_from([64, 7]),
    memory_threshold=st.just(1.0),
    num_host_blocks=num_host_blocks,
    speculative_tokens=speculative_tokens,
    grammar_drafts=grammar_drafts,
    prompt_lookup_min=prompt_lookup_min,
    start_prefixes=st.booleans(),
    draft_model=st.booleans(),
)
configs = memory_is_the_limit | any_limits
memories = st.builds(
    lambda size, cache, roles: Memory(*size, prefix_cache=cache, roles_matter=roles),
    st.sampled_from([(8, 2), (16, 1), (6, 3), (5, 4), (14, 2), (12, 3)]),
    st.sampled_from([True, True, False]),
    st.booleans(),
)
# Few different prompts with common beginnings, so that there is something to share.
STEMS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9], [7, 7, 7, 7, 7, 7])
prompts = st.one_of(
    st.builds(lambda stem, n: stem[:n], st.sampled_from(STEMS), st.integers(1, 6)),
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6),
)
lengths = st.sampled_from([10, 7, 9, 3, 1])
options = st.fixed_dictionaries(
    {},
    optional={
        "ignore_eos": st.booleans(),
        "n": st.sampled_from([2, 3, 4]),
        "beam_width": st.sampled_from([2, 3, 1]),
        "constrained": st.just(True),
        "min_tokens": st.sampled_from([4, 1, 8]),
        "priority": st.sampled_from([-1, 1]),
        "cache_salt": st.just("another"),
        "uses_cache": st.just(False),
        "adapter": st.sampled_from([1, 2]),
    },
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of what may happen.

    Submit, fork, cancel, end of a sample, send, commit, time, row failure, refusal, epoch loss.
    """

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(config=configs, memory=memories, num_digests=st.sampled_from([512, 1]))
    def make(self, config, memory, num_digests):
        self.patch.setattr(waiting, "DIGESTS_A_STEP", num_digests)
        self.world = World(config, memory)

    @rule(batch=st.lists(st.tuples(prompts, lengths, options), min_size=1, max_size=4))
    def submit(self, batch):
        for prompt, max_tokens, chosen in batch:
            self.world.submit(list(prompt), max_tokens, **chosen)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def submit_what_another_has_said(self, data):
        """The prompt is the beginning of another request's text: part prompt, part output."""
        other = data.draw(st.sampled_from(self.world.requests))
        text = [t for t in other.input_tokens + other.output_tokens if t]
        length = data.draw(st.integers(1, len(text))) if text else 0
        if length:
            adapter = data.draw(st.sampled_from([other.adapter, 1 - min(other.adapter, 1)]))
            self.world.submit(text[:length], 4, cache_salt=other.cache_salt, adapter=adapter)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), max_tokens=lengths)
    def fork(self, data, max_tokens):
        self.world.fork(data.draw(st.sampled_from(self.world.requests)), max_tokens)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(self.world.requests)))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), index=st.sampled_from([0, 1, 2]), num_tokens=st.integers(0, 5))
    def end_a_sample(self, data, index, num_tokens):
        """Its text is complete: a stop string was found."""
        request = data.draw(st.sampled_from(self.world.requests))
        self.world.end_sample(request, min(index, request.params.n - 1), num_tokens)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time(self, seconds):
        self.world.now += seconds

    @precondition(lambda self: len(self.world.in_flight) < 3)
    @rule()
    def send(self):
        self.world.send()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def commit(self):
        self.world.commit()

    @rule(num_steps=st.integers(1, 8), depth=st.sampled_from([3, 2, 1]))
    def run_steps(self, num_steps, depth):
        self.world.run_steps(num_steps, depth)

    @precondition(lambda self: len(self.world.in_flight) < 3)
    @rule(row=st.integers(0, 3))
    def send_with_a_failing_row(self, row):
        self.world.send(fail_row=row)

    @precondition(lambda self: len(self.world.in_flight) < 3)
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
            try:
                self.world.finish(depth=3)
            finally:
                self.patch.undo()


def test_any_mix_of_events_leaves_every_output_as_if_alone():
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=100, stateful_step_count=25, deadline=None)
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


arrivals = st.lists(st.tuples(st.integers(0, 3), prompts, lengths, options), min_size=4, max_size=9)


def run_arrivals(config, memory, depth, arrivals):
    world = World(config, memory)
    for num_steps, prompt, max_tokens, chosen in arrivals:
        for _ in range(num_steps):
            world.run_steps(1, depth)
            world.check_invariants()
        world.submit(list(prompt), max_tokens, **chosen)
    world.finish(depth=depth)
    stats = world.scheduler.get_stats()
    note(f"preemptions: {stats.num_preemptions}, by swap: {stats.num_swaps}")
    note(f"drafts: {stats.num_drafts}, kept: {stats.num_kept_drafts}")


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(config=configs, memory=memories, depth=st.sampled_from([2, 1, 3]), arrivals=arrivals)
def test_requests_that_arrive_at_any_time_in_a_small_pool_get_what_they_get_alone(
    config, memory, depth, arrivals
):
    run_arrivals(config, memory, depth, arrivals)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(config=configs, memory=memories, depth=st.sampled_from([2, 1, 3]), arrivals=arrivals)
def test_thousands_of_arrivals_in_a_small_pool_get_what_they_get_alone(
    config, memory, depth, arrivals
):
    run_arrivals(config, memory, depth, arrivals)


@pytest.mark.parametrize("num_host_blocks", [0, 8])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_requests_that_fit_only_one_at_a_time_both_get_what_they_get_alone(
    depth, num_host_blocks
):
    world = World(
        SchedulerConfig(memory_threshold=1.0, num_host_blocks=num_host_blocks), Memory(4, 4)
    )
    for _ in range(2):
        world.submit([1, 2, 3, 4], 12)
    world.finish(depth=depth)
    stats = world.scheduler.get_stats()
    assert stats.num_preemptions >= 1
    assert (stats.num_swaps >= 1) == (num_host_blocks > 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_decoding", [2, 3])
def test_newcomers_do_not_keep_taking_the_block_that_a_decode_row_waits_for(depth, num_decoding):
    # One token a step, and prompts that are owed every second one: a newcomer took the free block,
    # gave it back to the decode row it belongs to, and took it again.
    config = SchedulerConfig(
        max_batch_size=3, max_num_seqs=6, max_model_len=40, max_total_tokens=1,
        memory_threshold=1.0, prefill_patience=1,
    )  # fmt: skip
    world = World(config, Memory(2 * num_decoding + 1, 4))
    for number in range(2 * num_decoding + 2):
        world.submit([1 + number % 9] * (3 + number % 2), 10 - number % 2)
    world.finish(depth=depth)


@pytest.mark.parametrize("num_host_blocks", [0, 32])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_beams_of_two_searches_that_fit_only_one_at_a_time_do_not_block_each_other(
    depth, num_host_blocks
):
    config = SchedulerConfig(max_num_seqs=3, num_host_blocks=num_host_blocks)
    world = World(config, Memory(32, 4))
    for prompt in ([1, 2, 3], [4, 5, 6, 7]):
        world.submit(prompt, 6, beam_width=3)
    world.finish(depth=depth)
    assert world.scheduler.get_stats().num_preemptions >= 1


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_host_blocks", [0, 5, 32])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_beams_that_had_to_give_way_need_no_more_than_one_prompt_and_a_tail_each(
    depth, num_host_blocks, prefix_cache
):
    config = SchedulerConfig(
        max_total_tokens=5, num_host_blocks=num_host_blocks, memory_threshold=1.0
    )
    # 29 prompt tokens fill 7 blocks and a bit; 9 tokens more are computed: 3 blocks for each beam.
    world = World(config, Memory(7 + 3 * 3, 4, prefix_cache=prefix_cache))
    world.submit([1 + i % 9 for i in range(29)], 10, beam_width=3, priority=1)
    world.run_steps(9, depth)
    assert world.scheduler.get_stats().num_running == 3
    for _ in range(3):
        world.submit([3, 4, 5], 30)
    assert len(world.requests) == 4
    world.finish(depth=depth)
    assert world.scheduler.get_stats().num_preemptions >= 1


def test_a_fork_that_writes_into_the_block_of_an_ended_parent_takes_it_out_of_the_cache():
    world = World(SchedulerConfig(), Memory(32, 4, prefix_cache=True, roles_matter=False))
    parent = world.submit([1, 2, 3, 4, 5], 4)
    world.send()
    world.commit()
    for _ in range(3):  # the rest of its second block, and of its text
        world.send()
    world.fork(parent, 8)
    for _ in range(3):
        world.commit()
    world.run_steps(2, 1)
    world.submit([*parent.input_tokens, *parent.output_tokens], 3)  # would find that block
    world.finish(depth=3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_fork_that_copied_what_a_failed_row_wrote_is_computed_anew(depth):
    memory = Memory(num_blocks=8, block_size=2, prefix_cache=True, roles_matter=False)
    config = SchedulerConfig(max_batch_size=8, max_total_tokens=64, memory_threshold=1.0)
    world = World(config, memory)
    parent = world.submit([1, 4], 4, ignore_eos=True)
    world.send(fail_row=0)
    world.fork(parent, 10)
    world.finish(depth=depth)
