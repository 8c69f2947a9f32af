from __future__ import annotations

import pytest

from control_plane.core.errors import RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from planes.errors import SchedulerError, ValidationError


def make_scheduler(num_blocks: int = 16, max_num_seqs: int = 8) -> Scheduler:
    return Scheduler(SchedulerConfig(max_num_seqs=max_num_seqs), KVCacheManager(num_blocks, 4))


def make_request(number: int, *, arrival_time: float = 0.0, priority: int = 0) -> Request:
    params = GenerationParams(max_tokens=4, seed=number, ignore_eos=True)
    return Request(number, [1, 2, 3], params, arrival_time=arrival_time, priority=priority)


def order_of_admission(scheduler: Scheduler) -> list[int]:
    output = scheduler.schedule()
    return [] if output is None else output.prefill_request_ids


def test_an_adopted_request_stands_where_its_arrival_time_puts_it():
    one, other = make_scheduler(), make_scheduler()
    for number, arrival_time, priority in ((1, 1.0, 0), (2, 4.0, 0), (3, 9.0, -1)):
        one.add_request(make_request(number, arrival_time=arrival_time, priority=priority))
    for number, arrival_time in ((4, 2.0), (5, 3.0), (6, 4.0)):
        other.add_request(make_request(number, arrival_time=arrival_time))
    withdrawn = one.withdraw()
    assert [request.id for request in withdrawn] == [3, 1, 2]
    for request in withdrawn:
        other.adopt(request)
    assert order_of_admission(other) == [3, 1, 4, 5, 6, 2]
    assert not one.has_pending_work()


def test_only_what_holds_nothing_is_withdrawn():
    one = make_scheduler(max_num_seqs=1)
    for number in (1, 2, 3):
        one.add_request(make_request(number))
    assert order_of_admission(one) == [1]
    assert [request.id for request in one.withdraw([1, 3, 99])] == [3]
    one.lose_epoch()
    assert [request.id for request in one.withdraw([1, 3, 99])] == [1]
    assert [request.id for request in one.withdraw()] == [2]
    assert one.cancel(1) is None
    assert one.get_completed() == []


def test_what_an_adopted_request_finds_was_not_cached_for_it_if_it_had_run():
    def make() -> Scheduler:
        return Scheduler(SchedulerConfig(), KVCacheManager(16, 2, prefix_cache=True))

    one, other = make(), make()
    has_run, has_waited, first = make_request(1), make_request(2), make_request(3)
    one.add_request(has_run)
    one.schedule()
    one.lose_epoch()
    one.add_request(has_waited)
    withdrawn = one.withdraw()
    other.add_request(first)
    other.schedule()
    for request in withdrawn:
        other.adopt(request)
    assert sorted(order_of_admission(other)) == [1, 2]
    assert (has_run.cached_tokens, has_waited.cached_tokens) == (0, 2)


def test_a_withdrawn_request_says_that_it_waits_and_keeps_its_history():
    one, other = make_scheduler(), make_scheduler()
    request = make_request(1)
    one.add_request(request)
    one.schedule(1.0)
    one.lose_epoch()
    (withdrawn,) = one.withdraw()
    other.adopt(withdrawn)
    other.schedule(2.0)
    assert withdrawn is request
    assert [change.state for change in request.history] == [
        RequestState.PENDING,
        RequestState.PREFILL,
        RequestState.PENDING,
        RequestState.PREFILL,
    ]


def test_what_cannot_be_adopted_is_refused_and_changes_nothing():
    one, tiny, other = make_scheduler(), make_scheduler(num_blocks=1), make_scheduler()
    with pytest.raises(SchedulerError, match="was in no scheduler"):
        other.adopt(make_request(1))
    one.add_request(make_request(1))
    (request,) = one.withdraw()
    with pytest.raises(RequestNeverFitsError):
        tiny.adopt(request)
    assert not tiny.has_pending_work()
    other.adopt(request)
    with pytest.raises(SchedulerError, match="is known already"):
        other.adopt(request)
    other.schedule()
    with pytest.raises(SchedulerError, match="is prefill, not pending"):
        one.adopt(request)


def test_a_search_with_more_beams_than_run_at_once_is_not_adopted():
    one, small = make_scheduler(), make_scheduler(max_num_seqs=2)
    params = GenerationParams(max_tokens=4, seed=1, beam_width=3)
    one.add_request(Request(1, [1, 2, 3], params))
    (request,) = one.withdraw()
    with pytest.raises(ValidationError, match="beam_width must be at most max_num_seqs"):
        small.adopt(request)
    assert not small.has_pending_work()
