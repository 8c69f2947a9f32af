"""Two schedulers, each before a model plane of its own; when a plane is lost, requests move.

Every output must be what the request gets alone, wherever it was computed, and neither pool may
keep a block.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from control_plane.core.request import RequestState
from control_plane.core.scheduler import SchedulerConfig
from tests.properties.scheduler_promises import Memory
from tests.properties.scheduler_world import World
from tests.properties.test_scheduler_keeps_every_promise import (
    configs,
    lengths,
    memories,
    options,
    prompts,
)


class Side(World):
    """One of two worlds whose requests are numbered together."""

    def join(self, other: Side | None) -> None:
        self.numbers = itertools.count() if other is None else other.numbers
        if other is not None:
            self.salts, self.faulted = other.salts, other.faulted
            self.rules, self.stopped = other.rules, other.stopped
            self.adapters = other.adapters
            self.plane = self.new_plane(0)

    def next_number(self) -> int:
        return next(self.numbers)

    def give_away(self, to: Side, *, begins_anew: bool) -> int:
        """Move every request that holds nothing here and fits there; how many."""
        ids = [r.id for r in self.requests if to.blocks_of(r) <= to.memory.num_blocks]
        moved = self.scheduler.withdraw(ids)
        for request in moved:
            assert request.state is RequestState.PENDING
            self.requests.remove(request)
            to.given[request.id] = self.given.pop(request.id)
            for index in range(request.params.n):
                key = request.id, index
                to.received[key] = self.received.pop(key)
                if key in self.finished:
                    to.finished[key] = self.finished.pop(key)
            if begins_anew:
                request.search = None
            to.scheduler.adopt(request)
            to.requests.append(request)
        to.requests.sort(key=lambda request: request.arrival_time)
        return len(moved)


class MovingMachine(RuleBasedStateMachine):
    """Any order of submit, fork, cancel, steps, time, failures; a plane is lost, requests move."""

    @initialize(config=configs, memory=memories, extra_blocks=st.sampled_from([0, 3]))
    def make(self, config, memory, extra_blocks):
        larger = Memory(
            memory.num_blocks + extra_blocks,
            memory.block_size,
            memory.prefix_cache,
            memory.roles_matter,
            memory.num_host_blocks,
        )
        self.sides = (Side(config, memory), Side(config, larger))
        self.sides[0].join(None)
        self.sides[1].join(self.sides[0])

    @rule(side=st.integers(0, 1), batch=st.lists(st.tuples(prompts, lengths, options), max_size=4))
    def submit(self, side, batch):
        for prompt, max_tokens, chosen in batch:
            self.sides[side].submit(list(prompt), max_tokens, **chosen)

    @rule(side=st.integers(0, 1), max_tokens=lengths, data=st.data())
    def fork(self, side, max_tokens, data):
        if self.sides[side].requests:
            parent = data.draw(st.sampled_from(self.sides[side].requests))
            self.sides[side].fork(parent, max_tokens)

    @rule(side=st.integers(0, 1), data=st.data())
    def cancel(self, side, data):
        if self.sides[side].requests:
            self.sides[side].cancel(data.draw(st.sampled_from(self.sides[side].requests)))

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time(self, seconds):
        for side in self.sides:
            side.now += seconds

    @precondition(lambda self: any(len(side.in_flight) < 3 for side in self.sides))
    @rule(fail_row=st.sampled_from([None, None, 0, 2]), refuse=st.sampled_from([0, 0, 0, 0, 0, 1]))
    def send(self, fail_row, refuse):
        for side in self.sides:
            if len(side.in_flight) < 3:
                side.send(fail_row=fail_row, refuse=bool(refuse))

    @rule(side=st.integers(0, 1), num_steps=st.integers(1, 8), depth=st.sampled_from([3, 2, 1]))
    def run_steps(self, side, num_steps, depth):
        self.sides[side].run_steps(num_steps, depth)

    @rule(side=st.integers(0, 1), last_step=st.integers(0, 1000), begins_anew=st.booleans())
    def lose_a_plane(self, side, last_step, begins_anew):
        lost, other = self.sides[side], self.sides[1 - side]
        lost.lose_epoch(last_step)
        lost.give_away(other, begins_anew=begins_anew)

    @invariant()
    def every_promise_holds(self):
        for side in getattr(self, "sides", ()):
            side.check_invariants()

    def teardown(self):
        for side in getattr(self, "sides", ()):
            side.finish(depth=3)


def run_machine(max_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        MovingMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.wide
def test_requests_that_move_when_a_plane_is_lost_get_what_they_get_alone():
    run_machine(80, 25)


@pytest.mark.slow
def test_requests_that_move_many_times_get_what_they_get_alone():
    run_machine(3000, 50)


def make_sides(memory: Memory, **limits: float) -> tuple[Side, Side]:
    config = SchedulerConfig(**limits)  # type: ignore[arg-type]
    sides = Side(config, memory), Side(config, memory)
    sides[0].join(None)
    sides[1].join(sides[0])
    return sides


@pytest.mark.parametrize(
    "chosen",
    [{}, {"n": 3}, {"beam_width": 3, "n": 2}, {"n": 4, "ignore_eos": False}],
    ids=str,
)
def test_a_request_that_moves_after_any_number_of_steps_gets_what_it_gets_alone(chosen):
    for num_steps in range(10):
        sides = make_sides(Memory(64, 2))
        requests = [sides[0].submit([1, 2, n], 7, **chosen) for n in range(4)]
        sides[0].run_steps(num_steps, 2)
        num_live = sum(not request.state.is_final for request in requests)
        sides[0].lose_epoch(9)
        assert sides[0].give_away(sides[1], begins_anew=False) == num_live
        for side in sides:
            side.finish(depth=3)


def test_a_request_that_moves_leaves_nothing_on_the_host():
    sides = make_sides(Memory(4, 4, num_host_blocks=8), memory_threshold=1.0, num_host_blocks=8)
    for _ in range(2):
        sides[0].submit([1, 2, 3, 4], 12)
    while sides[0].scheduler.get_stats().num_host_blocks_used == 0:
        sides[0].run_steps(1, 1)
    assert len(sides[0].scheduler.withdraw()) == 1
    sides[0].run_steps(2, 1)  # with which what was under way to the host has come there
    assert sides[0].scheduler.get_stats().num_host_blocks_used == 0
