"""The scheduler of a model with states, under any mix of events.

The worlds are those of the other modules of this folder. `state_plane` says what is checked of
every row; the simulated executor gives another text if a state is not of all tokens.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from control_plane.core.request import RequestState
from control_plane.core.scheduler import SchedulerConfig
from tests.properties.scheduler_promises import Memory
from tests.properties.scheduler_world import World
from tests.properties.state_plane import with_states
from tests.properties.test_both_planes_give_each_request_its_own_text import (
    MAX_SLOTS,
    PipelinedPlane,
    Plane,
    limits,
    mix,
    run_mix,
)
from tests.properties.test_everything_at_once import run
from tests.properties.test_scheduler_keeps_every_promise import (
    SchedulerMachine,
    arrivals,
    configs,
    memories,
    run_arrivals,
)

nums_kept = st.sampled_from([6, 1, 2, 0])
least_tokens = st.sampled_from([1, 2, 4])
configs_with_states = st.builds(with_states, configs, nums_kept, least_tokens)


class StatesMachine(SchedulerMachine):
    """The same events; some find states."""

    @initialize(config=configs_with_states, memory=memories)
    def make(self, config, memory):
        self.world = World(config, memory)


def test_any_mix_of_events_leaves_every_state_that_of_the_tokens_before():
    run_state_machine_as_test(
        StatesMachine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
def test_any_long_mix_of_events_leaves_every_state_that_of_the_tokens_before():
    run_state_machine_as_test(
        StatesMachine,
        settings=settings(
            max_examples=4000,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(
    config=configs_with_states, memory=memories, depth=st.sampled_from([2, 1, 3]), arrivals=arrivals
)
def test_requests_that_arrive_at_any_time_find_states_of_their_beginnings_only(
    config, memory, depth, arrivals
):
    run_arrivals(config, memory, depth, arrivals)


@pytest.mark.wide
def test_whatever_befalls_them_together_requests_have_their_own_states():
    for seed in range(40):
        run(seed, has_states=True)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 9000, 1000))
def test_whatever_befalls_them_together_thousands_of_times_states_are_their_own(first_seed):
    for seed in range(first_seed, first_seed + 1000):
        run(seed, has_states=True)


mixes = given(
    config=st.builds(
        lambda config, *kept: with_states(replace(config, max_slots=MAX_SLOTS), *kept),
        limits,
        st.integers(0, 6),
        st.integers(1, 8),
    ),
    **mix,
)


@settings(max_examples=25, deadline=None)
@mixes
def test_any_mix_of_requests_on_both_planes_gives_each_its_own_text(config, **mixed):
    run_mix(config=config, **mixed)


@pytest.mark.slow
@pytest.mark.parametrize("plane_class", [Plane, PipelinedPlane])
@settings(max_examples=5000, deadline=None)
@mixes
def test_thousands_of_mixes_on_both_planes_give_each_its_own_text(plane_class, config, **mixed):
    run_mix(config=config, plane_class=plane_class, **mixed)


# --- what takes states, every time ---


def world_with_states(memory: Memory, num_kept: int = 4, **limits: float) -> World:
    return World(with_states(SchedulerConfig(**limits), num_kept, 1), memory)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chosen", [{"n": 3}, {"beam_width": 3}, {"constrained": True}], ids=str)
def test_samples_and_beams_have_states_of_their_own(depth, chosen):
    world = world_with_states(Memory(64, 2, prefix_cache=True), max_num_seqs=6)
    for _ in range(2):
        world.submit([1, 2, 3, 4, 5], 9, **chosen)
    world.finish(depth=depth)
    assert world.plane.num_state_copies >= 4 * ("constrained" not in chosen)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_that_had_to_give_way_fit_if_each_has_its_prompt(depth, prefix_cache):
    # 29 prompt tokens and 29 more fill 15 blocks, of each beam.
    memory = Memory(3 * 15, 4, prefix_cache=prefix_cache)
    world = world_with_states(memory, max_total_tokens=16, memory_threshold=1.0)
    world.submit([1 + i % 9 for i in range(29)], 30, beam_width=3, priority=1)
    world.run_steps(5, depth)
    for _ in range(6):
        world.submit([3, 4, 5], 30)
    assert len(world.requests) == 7
    world.finish(depth=depth)
    assert world.scheduler.get_stats().num_preemptions >= 1


def test_beams_are_refused_that_fit_only_with_one_prompt_for_all():
    world = world_with_states(Memory(3 * 10 - 1, 4))
    assert world.submit([1 + i % 9 for i in range(29)], 10, beam_width=3) is None


@pytest.mark.parametrize(("roles_matter", "num_computed"), [(True, 5), (False, 2)])
def test_turns_of_a_conversation_go_on_from_the_states_that_the_turns_before_left(
    roles_matter, num_computed
):
    """Behind the prompt before, or, where answers are found for prompts, behind the answer."""
    world = world_with_states(Memory(64, 2, prefix_cache=True, roles_matter=roles_matter))
    text = [1, 2, 3, 4, 5]
    for _ in range(5):
        turn = world.submit(list(text), 3)
        world.run_steps(6, 1)
        assert turn.state.is_final
        text = [*text, *turn.output_tokens, 9]
    assert world.scheduler.get_stats().num_state_hits == 4
    assert turn.cached_tokens == (len(turn.input_tokens) - num_computed) // 2 * 2
    world.finish(depth=1)


@pytest.mark.parametrize("depth", [2, 3])
def test_who_began_with_the_state_of_a_row_that_fails_does_not_fail_with_it(depth):
    world = world_with_states(Memory(64, 2, prefix_cache=True), max_prefill_tokens=4)
    first = world.submit([1, 2, 3, 4, 5], 9)
    world.send(fail_row=0)
    others = [world.submit([1, 2, 3, 4, 5], 9) for _ in range(2)]
    while len(world.in_flight) < depth and world.send():
        pass
    world.finish(depth=depth)
    assert first.state is RequestState.FAILED
    assert {other.state for other in others} == {RequestState.COMPLETED}


@pytest.mark.parametrize("depth", [2, 3])
def test_not_even_where_its_blocks_are_those_of_somebody_else(depth):
    world = world_with_states(Memory(64, 2, prefix_cache=True))
    world.submit([1, 2, 3, 4, 5, 5, 5], 20)  # whose blocks are found, with no state behind the 4
    world.run_steps(3, 1)
    second = world.submit([1, 2, 3, 4, 6, 6, 6], 9)
    world.send(fail_row=1)
    third = world.submit([1, 2, 3, 4, 7, 7, 7], 9)
    while len(world.in_flight) < depth and world.send():
        pass
    assert third.cached_tokens == 4
    world.finish(depth=depth)
    assert second.state is RequestState.FAILED
    assert third.state is RequestState.COMPLETED
