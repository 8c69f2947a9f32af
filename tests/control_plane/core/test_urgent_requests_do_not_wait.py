"""A request of a lower priority number does not wait for those of higher ones to end."""

from __future__ import annotations

import pytest

from control_plane.core.request import RequestState

URGENT = 99


def busy(engine, *, priorities, max_tokens=200, **limits):
    """Return an engine on which requests of these priorities run, by their ids from 1 on."""
    e = engine(**limits)
    for number, priority in enumerate(priorities, 1):
        e.ask(number, [number] * 4, max_tokens, priority=priority, arrival_time=number)
    while e.scheduler.get_stats().num_waiting:
        e.step()
    return e


def steps_to_first_token(e, request, most=30):
    for count in range(1, most + 1):
        e.step()
        if request.output_tokens:
            return count
    return None


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 4, "num_blocks": 400},
        {"max_num_seqs": 9, "num_blocks": 60, "memory_threshold": 0.1},
    ],
    ids=["slots", "memory"],
)
def test_it_takes_the_place_of_one_that_came_last_among_the_least_urgent(engine, limits):
    e = busy(engine, priorities=[5, 7, 7, 5], **limits)
    urgent = e.ask(URGENT, [8] * 8, 4, priority=0, arrival_time=50.0)
    assert steps_to_first_token(e, urgent) <= 3
    assert e.scheduler.get_stats().num_preemptions >= 1
    while not urgent.state.is_final:
        e.step()
    assert urgent.state is RequestState.COMPLETED
    e.run()


def test_who_gave_way_goes_on_where_it_was_and_says_the_same(engine):
    e = busy(engine, priorities=[5, 5], max_tokens=20, max_num_seqs=2)
    e.ask(URGENT, [8] * 4, 6, priority=0, arrival_time=50.0)
    e.run()
    assert e.scheduler.get_stats().num_preemptions == 1
    assert e.used_blocks == 0


@pytest.mark.parametrize("priority", [5, 6])
def test_one_that_is_no_more_urgent_waits(engine, priority):
    e = busy(engine, priorities=[5, 5, 5, 5], max_num_seqs=4, num_blocks=400)
    other = e.ask(URGENT, [8] * 4, 4, priority=priority, arrival_time=0.0)
    assert steps_to_first_token(e, other) is None
    assert e.scheduler.get_stats().num_preemptions == 0


@pytest.mark.parametrize("max_num_seqs", [2, 9])
def test_nobody_gives_way_where_that_would_not_be_enough(engine, max_num_seqs):
    """What the request needs is held by one that is as urgent."""
    e = engine(num_blocks=40, memory_threshold=1.0, max_total_tokens=200, max_num_seqs=max_num_seqs)
    e.ask(1, [1] * 100, 60, priority=0)
    e.ask(2, [2] * 8, 60, priority=5, arrival_time=1.0)
    e.step()
    e.step()
    e.ask(URGENT, [8] * 100, 4, priority=0, arrival_time=2.0)
    for _ in range(10):
        assert 2 in e.step().decode_request_ids
    assert e.scheduler.get_stats().num_preemptions == 0


@pytest.mark.parametrize(("num_tokens", "num_preemptions"), [(140, 0), (80, 4)])
def test_blocks_that_samples_share_are_counted_once(engine, num_tokens, num_preemptions):
    """Of 60 blocks four samples hold 15 together and one each; an urgent stream holds 31."""
    e = engine(num_blocks=60, memory_threshold=1.0, max_total_tokens=400)
    e.ask(1, [1] * 120, 60, priority=0)
    e.ask(2, [2] * 60, 12, n=4, priority=5, arrival_time=1.0)
    for _ in range(2):
        e.step()
    urgent = e.ask(URGENT, [8] * num_tokens, 1, priority=0, arrival_time=2.0)
    assert (steps_to_first_token(e, urgent, most=6) is None) == (num_preemptions == 0)
    assert e.scheduler.get_stats().num_preemptions == num_preemptions
    e.run()


def test_nobody_gives_way_where_a_slot_is_about_to_be_free(engine):
    e = engine(num_blocks=200, max_num_seqs=3)
    e.ask(1, [1] * 4, 3)
    for number in (2, 3):
        e.ask(number, [number] * 4, 60, priority=5)
    e.step()
    e.send()
    e.send()  # with the last token of the first
    e.ask(URGENT, [8] * 4, 4, arrival_time=2.0)
    for _ in range(3):
        e.commit()
        e.send()
    assert e.scheduler.get_stats().num_preemptions == 0


def test_of_more_streams_than_rows_the_most_urgent_have_a_row_in_each_step(engine):
    e = busy(engine, priorities=[5] * 6, max_batch_size=4, num_blocks=400, prefill_patience=1)
    urgent = [e.ask(50 + n, [8] * 4, 40, priority=0, arrival_time=60.0 + n) for n in range(2)]
    while not all(request.output_tokens for request in urgent):
        e.step()
    served = [e.step().decode_request_ids for _ in range(12)]
    assert all({50, 51} <= set(ids) for ids in served)
    others = [request_id for ids in served for request_id in ids if request_id < 50]
    assert set(others) == {1, 2, 3, 4, 5, 6}
    assert max(map(others.count, range(1, 7))) - min(map(others.count, range(1, 7))) <= 1
