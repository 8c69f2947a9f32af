"""Priorities, the history of a request, and the numbers the scheduler gives."""

from __future__ import annotations

import pytest

from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_cache import KVCacheManager, KVCacheManagerProtocol
from control_plane.core.request import RequestState, StateChange
from control_plane.core.scheduler import Scheduler
from planes.errors import ConfigError


def test_a_lower_priority_number_is_started_first(engine):
    e = engine(max_num_seqs=1)
    e.ask(1, [7], max_tokens=1)
    for request_id, priority in ((2, 0), (3, -5), (4, 9), (5, -5)):
        e.ask(request_id, [7], max_tokens=1, priority=priority)
    served = [e.step().prefill_request_ids for _ in range(5)]
    assert served == [[3], [5], [1], [2], [4]]


def test_an_urgent_prompt_does_not_wait_for_the_rest_of_a_long_one(engine):
    e = engine(max_total_tokens=8)
    e.ask(1, [7] * 30, max_tokens=1)
    assert e.step().prefill_request_ids == [1]
    e.ask(2, [8] * 5, max_tokens=1, arrival_time=1.0)
    e.ask(3, [9] * 5, max_tokens=1, arrival_time=2.0, priority=-1)
    output = e.step()
    assert output.prefill_request_ids == [3, 1]
    assert output.batch.query_lens == [5, 3]
    assert [e.step().prefill_request_ids for _ in range(3)] == [[1], [1], [1, 2]]


def test_the_chunks_of_an_urgent_prompt_come_before_the_rest_of_a_long_one(engine):
    e = engine(max_total_tokens=8)
    e.ask(1, [7] * 30, max_tokens=1)
    e.step()
    e.ask(2, [8] * 20, max_tokens=1, priority=-1)
    assert [e.step().prefill_request_ids for _ in range(3)] == [[2], [2], [2, 1]]


@pytest.mark.parametrize("num_blocks", range(26, 30))
def test_a_prompt_that_gives_way_to_another_in_the_same_step_has_no_row_in_it(engine, num_blocks):
    e = engine(num_blocks=num_blocks, block_size=1, memory_threshold=1.0, max_total_tokens=6)
    streams = [e.ask(n, [7], max_tokens=8, priority=-1) for n in range(1, 5)]
    long = e.ask(5, [8] * 9, max_tokens=1, priority=1)
    e.step()
    urgent = e.ask(6, [9] * 7, max_tokens=1)  # at last a token is left for the long one
    e.run()
    assert all(len(request.output_tokens) == 8 for request in streams)
    assert len(long.output_tokens) == len(urgent.output_tokens) == 1
    assert e.used_blocks == 0


def test_out_of_blocks_the_least_urgent_gives_way_even_if_it_came_first(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0)
    late = e.ask(1, [7, 7], max_tokens=5, priority=1)
    urgent = e.ask(2, [8, 8], max_tokens=5, priority=-1)
    e.step()
    e.step()
    assert e.step().decode_request_ids == [2]
    assert late.state is RequestState.PENDING
    e.run()
    assert len(late.output_tokens) == len(urgent.output_tokens) == 5


def test_every_state_is_noted_with_the_time_it_was_entered(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0)
    e.ask(1, [7, 7], max_tokens=5)
    request = e.ask(2, [8, 8], max_tokens=3, arrival_time=10.0)
    now = 11.0
    while e.scheduler.has_pending_work():
        e.send(now)
        e.commit(now=now + 0.5)
        now += 1.0
    assert request.history == [
        StateChange(RequestState.PENDING, 10.0),
        StateChange(RequestState.PREFILL, 11.0),
        StateChange(RequestState.DECODE, 11.5),
        StateChange(RequestState.PENDING, 13.0),
        StateChange(RequestState.PREFILL, 16.0),
        StateChange(RequestState.DECODE, 16.5),
        StateChange(RequestState.COMPLETED, 16.5),
    ]
    late = e.ask(3, [7], max_tokens=1, arrival_time=99.0)
    e.run()  # by a clock that says less than the request's own time
    assert {change.at for change in late.history} == {99.0}


def test_fragmentation_is_the_share_of_places_without_a_token(engine):
    e = engine(block_size=4)
    e.ask(1, [7] * 5)
    e.ask(2, [7] * 7)
    e.step()
    stats = e.scheduler.get_memory_stats()
    assert stats.used_blocks == 4
    assert stats.internal_fragmentation == pytest.approx(4 / 16)
    e.step()
    assert e.scheduler.get_memory_stats().internal_fragmentation == pytest.approx(2 / 16)
    e.run()
    assert e.scheduler.get_memory_stats().internal_fragmentation == 0


def test_the_host_pool_may_be_absent_but_not_negative():
    assert SchedulerConfig(num_host_blocks=0).num_host_blocks == 0
    with pytest.raises(ConfigError, match="num_host_blocks must be an integer of at least 0"):
        SchedulerConfig(num_host_blocks=-1)


class PlainManager:
    """A user's own manager that shares nothing: only what `KVCacheManagerProtocol` names."""

    def __init__(self) -> None:
        self._kv = KVCacheManager(64, 4)
        for name in (
            "allocate_sequence", "allocate_block", "grow_sequence", "free_sequence",
            "get_block_table", "get_memory_stats", "can_allocate",
        ):  # fmt: skip
            setattr(self, name, getattr(self._kv, name))

    block_size = 4


def test_a_manager_that_cannot_share_serves_every_request_all_the_same(engine):
    manager = PlainManager()
    assert isinstance(manager, KVCacheManagerProtocol)
    e = engine()
    e.scheduler = Scheduler(SchedulerConfig(), manager)
    request = e.ask(1, [7] * 6, n=3, max_tokens=3)
    e.run()
    assert [s.output_tokens for s in request.samples] == [[5, 5, 5]] * 3
    assert manager.get_memory_stats().used_blocks == 0


def test_who_says_no_time_means_the_last_one_that_was_said(engine):
    e = engine()
    request = e.ask(1, [7])
    e.send(5.0)
    e.commit(now=7.0)
    e.send(8.0)
    e.commit(now=9.0)
    e.scheduler.cancel(1)
    assert [change.at for change in request.history] == [0.0, 5.0, 7.0, 9.0]
