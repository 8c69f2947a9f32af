"""Memory by three rules on one trace: all end it, and their order is what paging promises."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.core.interface import SchedulerConfig
from hetero_infer.bench.memory_contiguous import RegionPool, simulate_contiguous
from hetero_infer.bench.memory_paged import run_paged
from hetero_infer.bench.memory_trace import (
    MemoryRun,
    StepUse,
    TraceRequest,
    draw_trace,
    draw_uniform,
)
from planes.errors import ConfigError

BLOCK = 8
POOL = 512
LONGEST = 128
LIMITS = SchedulerConfig(
    max_batch_size=POOL, max_num_seqs=POOL, max_model_len=LONGEST, max_total_tokens=64
)


def all_three(trace: list[TraceRequest]) -> list[MemoryRun]:
    return [
        simulate_contiguous(trace, POOL, LIMITS, grows=False),
        simulate_contiguous(trace, POOL, LIMITS, grows=True),
        run_paged(trace, POOL // BLOCK, BLOCK, LIMITS),
    ]


def test_static_memory_holds_as_many_as_the_longest_fit_and_paged_memory_more_than_dynamic():
    static, dynamic, paged = all_three(draw_trace(60, 40, 20, LONGEST, seed=1))
    assert max(step.num_running for step in static.steps) == POOL // LONGEST
    assert static.sustained_concurrency < dynamic.sustained_concurrency
    assert dynamic.sustained_concurrency < paged.sustained_concurrency
    assert static.waste > dynamic.waste > paged.waste > 0
    assert len(static.steps) > len(dynamic.steps) > len(paged.steps)


PREEMPTED_AT_THE_LAST_TOKEN = [
    (40, 31), (47, 37), (40, 31), (41, 30), (78, 23), (17, 25), (87, 5), (44, 30), (25, 34),
    (48, 31), (44, 30), (29, 15),
]  # fmt: skip


@pytest.mark.wide
@example(PREEMPTED_AT_THE_LAST_TOKEN)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 38), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    )
)
def test_every_trace_ends_within_the_pool_and_uses_no_more_than_it_reserves(lengths):
    for run in all_three([TraceRequest(*pair) for pair in lengths]):
        assert run.steps[-1].num_waiting == 0
        for step in run.steps:
            assert 0 < step.used <= step.reserved <= POOL
        assert 0 <= run.waste < 1


def test_paged_memory_reserves_less_than_a_block_too_much_for_each_request():
    trace = draw_trace(40, 30, 10, LONGEST, 2)
    for step in run_paged(trace, POOL // BLOCK, BLOCK, LIMITS, depth=1).steps:
        assert step.reserved - step.used < BLOCK * step.num_running


def test_what_the_next_step_takes_ahead_is_reserved_and_not_used():
    trace = draw_trace(40, 30, 10, LONGEST, 2)
    alone, ahead = (run_paged(trace, POOL // BLOCK, BLOCK, LIMITS, depth=depth) for depth in (1, 2))
    assert alone.waste < ahead.waste
    for step in ahead.steps:
        at_most = (BLOCK + 1) * step.num_running + LIMITS.max_total_tokens
        assert step.reserved - step.used < at_most


def test_samples_hold_their_prompt_once_and_copy_its_last_block():
    trace = [TraceRequest(45, 20, 3)]
    paged = run_paged(trace, POOL // BLOCK, BLOCK, LIMITS, depth=1)
    assert paged.moved_tokens == 2 * BLOCK  # the last of the three needs no copy
    num_own = 2 * BLOCK * 3  # tokens 40 to 55 of each
    assert {step.reserved for step in paged.steps if step.used == 40 + 3 * 10} == {40 + num_own}
    static = simulate_contiguous(trace, POOL, LIMITS, grows=False)
    assert max(step.num_running for step in static.steps) == 3


@pytest.mark.wide
def test_lengths_uniform_in_64_to_2048_waste_less_than_a_twentieth_and_run_more_than_static():
    limits = SchedulerConfig(
        max_batch_size=16384, max_num_seqs=16384, max_model_len=2048, max_total_tokens=4096
    )
    trace = draw_uniform(96, 64, 2048, 0.1, seed=0)
    assert {request.num_samples for request in trace} == {1, 2}
    static = simulate_contiguous(trace, 16384, limits, grows=False)
    paged = run_paged(trace, 1024, 16, limits)
    assert paged.num_preemptions > 0
    assert paged.moved_tokens > 0
    assert paged.waste < 0.05
    assert paged.sustained_concurrency >= 1.5 * static.sustained_concurrency


def test_a_request_alone_takes_the_same_steps_by_every_rule():
    runs = all_three([TraceRequest(70, 9)])
    assert [len(run.steps) for run in runs] == [2 + 8] * 3
    assert [run.steps[-1].used for run in runs] == [78] * 3


@pytest.mark.wide
@given(st.data())
def test_regions_never_overlap_and_free_neighbours_become_one_run(data):
    pool, held = RegionPool(40), {}
    for number in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            if data.draw(st.booleans()):
                more = data.draw(st.integers(1, 5))
                if pool.extend(start, held[start], more):
                    held[start] += more
            else:
                pool.release(start, held.pop(start))
        else:
            length = data.draw(st.integers(1, 12))
            start = pool.allocate(length)
            if start is not None:
                held[start] = length
        taken = [at for s, n in held.items() for at in range(s, s + n)]
        assert len(taken) == len(set(taken)) == 40 - pool.num_free, number
        free = "".join(" " if at in taken else "f" for at in range(40))
        assert pool.largest_run == max(map(len, free.split()), default=0)


def test_figures_are_of_the_steps_in_which_somebody_waits():
    steps = [StepUse(2, 1, 100, 40, 10), StepUse(4, 1, 100, 60, 30), StepUse(1, 0, 100, 1)]
    run = MemoryRun("any", 200, steps)
    assert run.sustained_concurrency == 3
    assert run.waste == pytest.approx(0.5)
    assert run.stranded == pytest.approx(0.1)


def test_a_trace_is_the_same_for_the_same_seed_and_within_the_model():
    trace = draw_trace(200, 50, 50, 64, seed=3)
    assert trace == draw_trace(200, 50, 50, 64, seed=3) != draw_trace(200, 50, 50, 64, seed=4)
    assert all(r.prompt_tokens + r.output_tokens <= 64 for r in trace)
    assert all(min(r.prompt_tokens, r.output_tokens) >= 1 for r in trace)


def test_a_uniform_trace_is_within_its_bounds():
    trace = draw_uniform(300, 5, 9, 0.5, seed=3)
    assert {r.prompt_tokens + r.output_tokens for r in trace} == {5, 6, 7, 8, 9}
    assert all(min(r.prompt_tokens, r.output_tokens) >= 1 for r in trace)
    assert trace == draw_uniform(300, 5, 9, 0.5, seed=3)


def test_a_pool_that_cannot_hold_the_longest_request_in_one_piece_is_refused():
    with pytest.raises(ConfigError, match=r"pool of 100 tokens must hold max_model_len \(128\)"):
        simulate_contiguous([TraceRequest(1, 1)], 100, LIMITS, grows=True)
