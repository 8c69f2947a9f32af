from __future__ import annotations

import itertools

import pytest

from control_plane.core.batch import StepBatch, StepResult
from control_plane.core.interface import SchedulerOutput
from control_plane.engine.deadlines import (
    FRESH_PATIENCE_S,
    GENEROSITY,
    LEAST_PATIENCE_S,
    MAX_DOUBLINGS,
    MAX_KINDS,
    NUM_FRESH_STEPS,
    StepCost,
    StepDeadlines,
)
from control_plane.engine.step_gauges import NUM_KEPT, StepFigures, StepGauges, percentile_99
from control_plane.engine.steps_in_flight import DRY_STEPS, SETTLING_STEPS, StepsInFlight
from control_plane.errors import LinkError

DECODE = StepCost(num_tokens=32, num_pairs=32 * 100)
PREFILL = StepCost(num_tokens=512, num_pairs=512 * 512)


def seen(*steps: tuple[StepCost, float], times: int = NUM_FRESH_STEPS) -> StepDeadlines:
    deadlines = StepDeadlines()
    for cost, took_s in steps * times:
        deadlines.note(cost, took_s)
    return deadlines


def test_the_cost_of_a_step_is_its_tokens_and_what_they_look_at():
    decode = StepBatch(1, query_lens=[1, 1, 1], slots=[0, 1, 2], positions=[0, 7, 99])
    assert StepCost.of(decode) == StepCost(3, 1 + 8 + 100)
    mixed = StepBatch(1, query_lens=[1, 4], slots=[0, 1], positions=[9, 0])
    assert StepCost.of(mixed) == StepCost(5, 10 + 16)
    assert StepCost.of(StepBatch(1)) == StepCost(0, 0)


def test_a_fresh_plane_gets_time_to_compile_and_more_for_more_tokens():
    deadlines = StepDeadlines()
    assert deadlines.patience_s(DECODE) > FRESH_PATIENCE_S
    assert deadlines.patience_s(PREFILL) > deadlines.patience_s(DECODE)
    for _ in range(NUM_FRESH_STEPS - 1):
        deadlines.note(DECODE, 0.5)
    assert deadlines.patience_s(DECODE) > FRESH_PATIENCE_S
    deadlines.note(DECODE, 0.5)
    assert deadlines.patience_s(DECODE) == pytest.approx(GENEROSITY * 0.5)


def test_patience_follows_the_measured_speed_and_has_a_floor():
    assert seen((DECODE, 2.0)).patience_s(DECODE) == pytest.approx(20.0)
    assert seen((DECODE, 0.01)).patience_s(DECODE) == LEAST_PATIENCE_S


def test_a_larger_step_gets_more_and_a_smaller_one_no_more():
    deadlines = seen((DECODE, 1.0))
    twice_the_tokens = StepCost(DECODE.num_tokens * 2, DECODE.num_pairs)
    three_times_the_context = StepCost(DECODE.num_tokens, DECODE.num_pairs * 3)
    assert deadlines.patience_s(twice_the_tokens) == pytest.approx(20.0)
    assert deadlines.patience_s(three_times_the_context) == pytest.approx(30.0)
    assert deadlines.patience_s(StepCost(1, 1)) == pytest.approx(10.0)


def test_each_kind_of_step_is_judged_by_the_kind_that_says_most():
    deadlines = seen((DECODE, 0.5), (PREFILL, 3.0))
    assert deadlines.patience_s(PREFILL) == pytest.approx(30.0)
    assert deadlines.patience_s(DECODE) == pytest.approx(5.0)


def test_a_step_far_larger_than_any_seen_may_compile_too():
    assert seen((DECODE, 0.01)).patience_s(PREFILL) > FRESH_PATIENCE_S


def test_one_slow_step_hardly_moves_the_estimate_and_a_slower_plane_does():
    deadlines = seen((DECODE, 1.0))
    deadlines.note(DECODE, 1000.0)
    assert deadlines.patience_s(DECODE) < 2 * 10.0
    for _ in range(20):
        deadlines.note(DECODE, 3.0)
    assert deadlines.patience_s(DECODE) == pytest.approx(30.0, rel=0.05)


def test_patience_doubles_with_every_step_overdue_in_a_row_up_to_a_bound():
    deadlines = seen((DECODE, 1.0))
    for doublings in range(1, MAX_DOUBLINGS + 3):
        deadlines.note_overdue()
        factor = 2.0 ** min(doublings, MAX_DOUBLINGS)
        assert deadlines.patience_s(DECODE) == pytest.approx(10.0 * factor)
    deadlines.note(DECODE, 1.0)
    assert deadlines.patience_s(DECODE) == pytest.approx(10.0)


def test_another_plane_is_fresh_again():
    deadlines = seen((DECODE, 0.01))
    deadlines.forget()
    assert deadlines.patience_s(DECODE) > FRESH_PATIENCE_S


def test_what_is_remembered_is_bounded_and_the_oldest_kind_goes_first():
    deadlines = seen((StepCost(1, 1), 0.001))
    for power in range(2, 2 + MAX_KINDS):
        deadlines.note(StepCost(1, 2**power), 1.0)
    assert len(deadlines._kinds) == MAX_KINDS
    assert deadlines.patience_s(StepCost(1, 1)) == pytest.approx(10.0)


class World:
    """Steps in flight on a clock of the test's."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.steps = StepsInFlight(lambda: self.now_s)
        self.last = 0

    def send(self) -> None:
        self.last += 1
        batch = StepBatch(self.last, query_lens=[1], slots=[0], positions=[9])
        self.steps.add(SchedulerOutput(batch, [], []))

    def answer(self, **timings: int) -> None:
        self.steps.take(StepResult(self.last, **timings))

    def warm_up(self, took_s: float) -> None:
        for _ in range(NUM_FRESH_STEPS):
            self.send()
            self.now_s += took_s
            self.answer()


def test_only_the_oldest_step_has_a_deadline_and_it_begins_when_it_is_the_oldest():
    world = World()
    assert world.steps.remaining_s is None
    world.warm_up(1.0)
    world.send()
    world.now_s += 9.0
    world.send()
    assert world.steps.remaining_s == pytest.approx(1.0)
    world.answer()
    assert world.steps.remaining_s == pytest.approx(17.5)  # 9 s count as 4, and by a quarter


def test_a_result_that_waited_for_the_engine_took_as_long_as_the_plane_says():
    world = World()
    world.warm_up(1.0)
    for _ in range(20):
        world.send()
        world.answer(execute_us=2_000_000)
    world.send()
    assert world.steps.remaining_s == pytest.approx(20.0, rel=0.01)


def test_an_overdue_step_is_a_stall_that_is_named_and_counted_until_there_is_progress():
    world = World()
    world.warm_up(1.0)
    world.send()
    world.steps.check()
    world.now_s += 10.5
    assert world.steps.last_step_age_s == pytest.approx(10.5)
    with pytest.raises(LinkError, match=f"step {world.last} is overdue: no result in 10 s"):
        world.steps.check()
    assert (world.steps.is_stalled, world.steps.num_stalls) == (True, 1)
    world.steps.clear()
    assert world.steps.is_stalled  # a new session alone is no progress
    assert world.steps.last_step_age_s == 0.0
    world.send()
    assert world.steps.remaining_s == pytest.approx(20.0)  # measured speed, twice the patience
    world.answer()
    assert not world.steps.is_stalled


def test_after_a_loss_that_was_no_stall_the_plane_is_another_process():
    world = World()
    world.warm_up(0.01)
    world.send()
    world.steps.clear()
    world.send()
    assert world.steps.remaining_s > FRESH_PATIENCE_S


def test_idling_without_work_is_no_idle_share_and_with_work_it_is():
    gauges = StepGauges()
    empty = gauges.read()
    assert empty == StepFigures(None, None, None, None)
    gauges.note(StepResult(1, execute_us=900, idle_us=10**9, queue_us=3), had_work=False)
    gauges.note(StepResult(2, execute_us=1000, idle_us=100, waited_us=7, queue_us=5), had_work=True)
    figures = gauges.read()
    assert figures.plane_step_s == pytest.approx(950e-6)
    assert figures.plane_idle_share == pytest.approx(100 / 2000)
    assert figures.plane_queue_s == pytest.approx(4e-6)
    assert figures.scheduling_delay_p99_s == pytest.approx(7e-6)


def test_only_the_last_steps_count():
    gauges = StepGauges()
    for step in range(NUM_KEPT):
        gauges.note(StepResult(step, execute_us=10**6), had_work=True)
    for step in range(NUM_KEPT):
        gauges.note(StepResult(step, execute_us=10, waited_us=step), had_work=True)
    assert gauges.read().plane_step_s == pytest.approx(10e-6)
    assert percentile_99(list(range(1, 101))) == 99
    assert percentile_99([5]) == 5


def after(steps: StepsInFlight, step_id: int, *, idle_us: int) -> list[int]:
    """Let a step of a millisecond come back; how many may be under way, of at most 1, 2, 3, 4."""
    steps.add(SchedulerOutput(StepBatch(step_id), [], []))
    steps.take(StepResult(step_id, [], execute_us=1000, idle_us=idle_us))
    return [steps.depth(most) for most in (1, 2, 3, 4)]


def test_a_third_batch_goes_ahead_for_some_steps_where_the_device_has_waited_for_work():
    steps = StepsInFlight(lambda: 0.0)
    assert after(steps, 1, idle_us=500) == [1, 2, 2, 2]  # nobody wanted anything of it
    steps.note_work(is_left=True)
    assert after(steps, 2, idle_us=50) == [1, 2, 2, 2]
    assert after(steps, 3, idle_us=51) == [1, 2, 3, 3]
    for step_id in range(4, 3 + DRY_STEPS):
        assert after(steps, step_id, idle_us=0) == [1, 2, 3, 3]
    assert after(steps, 3 + DRY_STEPS, idle_us=0) == [1, 2, 2, 2]
    assert after(steps, 4 + DRY_STEPS, idle_us=900) == [1, 2, 3, 3]
    steps.clear()
    assert steps.depth(4) == 2


def test_further_batches_go_ahead_one_by_one_up_to_eight_where_the_device_still_waits():
    steps = StepsInFlight(lambda: 0.0)
    steps.note_work(is_left=True)
    depths = []
    for step_id in range(1, 100):
        after(steps, step_id, idle_us=100)
        depths.append(steps.depth(8))
    assert list(dict.fromkeys(depths)) == [3, 4, 5, 6, 7, 8]
    assert all(depths.count(depth) == SETTLING_STEPS + 1 for depth in (3, 4, 5, 6, 7))


@pytest.mark.parametrize(("queue_us", "depth"), [(1100, 2), (1099, 3)])
def test_a_batch_that_was_there_before_the_step_ahead_of_it_calls_for_no_further_one(
    queue_us, depth
):
    """The device has waited for its launch then, which more batches would not hasten."""
    steps = StepsInFlight(lambda: 0.0)
    steps.note_work(is_left=True)
    steps.add(SchedulerOutput(StepBatch(1), [], []))
    steps.take(StepResult(1, [], execute_us=1000, idle_us=100, queue_us=queue_us))
    assert steps.depth(8) == depth


def test_a_fourth_batch_goes_ahead_where_a_third_one_did_not_keep_the_device_at_work():
    steps = StepsInFlight(lambda: 0.0)
    steps.note_work(is_left=True)
    step_ids = itertools.count(1)
    assert after(steps, next(step_ids), idle_us=100) == [1, 2, 3, 3]
    for _ in range(SETTLING_STEPS):  # sent before the third one was there
        assert after(steps, next(step_ids), idle_us=100) == [1, 2, 3, 3]
    for _ in range(3 * SETTLING_STEPS):
        assert after(steps, next(step_ids), idle_us=100) == [1, 2, 3, 4]
    for _ in range(DRY_STEPS - 1):
        assert after(steps, next(step_ids), idle_us=0) == [1, 2, 3, 4]
    for _ in range(DRY_STEPS):
        assert after(steps, next(step_ids), idle_us=0) == [1, 2, 3, 3]
    assert after(steps, next(step_ids), idle_us=0) == [1, 2, 2, 2]
