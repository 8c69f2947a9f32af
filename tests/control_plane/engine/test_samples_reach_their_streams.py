"""Several samples of a request, and what is told of requests, through loop and fake plane."""

from __future__ import annotations

import pytest

from control_plane.config import SchedulingLimits
from control_plane.core.request import FinishReason, RequestState
from control_plane.errors import RequestFailedError

PENDING, PREFILL, DECODE = RequestState.PENDING, RequestState.PREFILL, RequestState.DECODE
COMPLETED, CANCELLED = RequestState.COMPLETED, RequestState.CANCELLED


@pytest.mark.parametrize("depth", [1, 2])
def test_each_sample_gets_its_own_text_and_the_request_ends_once(drive, expected, depth):
    driver = drive(pipeline_depth=depth)
    request_id = driver.submit("hello there", 9, seed=4, n=3)
    other = driver.submit("hello you", 5, seed=1, n=2)
    driver.run()
    for sample in range(3):
        assert driver.text(request_id, sample) == expected("hello there", 9, 4, sample)
        assert driver.reasons[request_id, sample] is FinishReason.LENGTH
    assert len({driver.text(request_id, sample) for sample in range(3)}) == 3
    assert driver.text(other, 1) == expected("hello you", 5, 1, 1)
    end = driver.ends[request_id]
    assert (end.state, end.finish_reason) == (COMPLETED, FinishReason.LENGTH)
    assert driver.loop.metrics.generated_tokens == 3 * 9 + 2 * 5
    assert driver.loop.metrics.completed_requests == 2
    assert driver.loop.memory_stats.used_blocks == 0


def test_samples_end_one_by_one_and_the_request_as_its_first_one_did(drive, fake_plane, expected):
    fake_plane.sample_lens = {0: 3, 2: 5}
    driver = drive()
    request_id = driver.submit("hello", 8, n=3)
    driver.run()
    reasons = [driver.reasons[request_id, sample] for sample in range(3)]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    for sample, length in enumerate((3, 8, 5)):
        assert driver.text(request_id, sample) == expected("hello", length, 0, sample)
    assert driver.ends[request_id].finish_reason is FinishReason.STOP
    (info,) = driver.loop.list_requests(include_ended=True)
    assert info.generated_tokens == (3, 8, 5)


def test_a_prompt_is_held_once_for_all_samples(drive, fake_plane):
    driver = drive(pipeline_depth=1)
    request_id = driver.submit("x" * 41, 4, n=4)
    driver.run_until(lambda: len(driver.samples.get((request_id, 3), ())) >= 2)
    # 11 blocks of 4 for the prompt and the first tokens; three of the samples copied its tail.
    assert driver.loop.memory_stats.used_blocks == 11 + 3
    assert sum(len(batch.copies) for batch in fake_plane.batches) == 3
    driver.run()


def test_samples_in_a_small_pool_are_preempted_and_swapped_and_keep_their_texts(
    drive, fake_plane, expected
):
    fake_plane.num_blocks = 10
    fake_plane.num_host_blocks = 16
    driver = drive(limits=SchedulingLimits(memory_threshold=1.0))
    ids = [driver.submit(f"prompt {i}", 16, seed=i, n=2) for i in range(4)]
    driver.run()
    for i, request_id in enumerate(ids):
        for sample in range(2):
            assert driver.text(request_id, sample) == expected(f"prompt {i}", 16, i, sample)
    metrics, memory = driver.loop.metrics, driver.loop.memory_stats
    assert 0 < metrics.num_swaps <= metrics.num_preemptions
    assert (memory.used_blocks, memory.used_host_blocks, memory.total_host_blocks) == (0, 0, 16)


def test_cancelling_ends_every_sample(drive):
    driver = drive()
    request_id = driver.submit("long", 200, n=3)
    driver.run_until(lambda: len(driver.samples.get((request_id, 2), ())) >= 2)
    driver.loop.inbox.cancel(request_id)
    driver.run()
    assert driver.ends[request_id].finish_reason is FinishReason.CANCELLED
    assert driver.reasons == {}
    assert driver.loop.memory_stats.used_blocks == 0


def test_a_failing_row_fails_the_request_with_all_its_samples(drive, fake_plane, expected):
    fake_plane.poisoned_prompt = b"bad"
    driver = drive()
    bad, good = driver.submit("bad one", n=3), driver.submit("good one", n=2)
    driver.run()
    assert isinstance(driver.ends[bad].error, RequestFailedError)
    assert driver.text(good, 1) == expected("good one", 12, 0, 1)


def test_what_a_prompt_shares_with_an_earlier_one_is_not_computed_again(drive, expected):
    driver = drive()
    first = driver.submit("the same beginning, one", 6)
    driver.run()
    second = driver.submit("the same beginning, two", 6)
    driver.run()
    assert driver.text(second) == expected("the same beginning, two", 6)
    assert (driver.ends[first].cached_tokens, driver.ends[second].cached_tokens) == (0, 20)
    assert driver.loop.metrics.cached_tokens == 20
    assert driver.loop.memory_stats.cached_blocks > 0
    stranger = driver.submit("the same beginning, two", 6, cache_salt="another tenant")
    driver.run()
    assert driver.ends[stranger].cached_tokens == 0


def test_without_prefix_cache_nothing_is_found(drive):
    driver = drive(limits=SchedulingLimits(prefix_cache=False))
    for _ in range(2):
        request_id = driver.submit("the same beginning", 3)
        driver.run()
    assert driver.ends[request_id].cached_tokens == 0
    assert driver.loop.memory_stats.cached_blocks == 0


def test_the_states_of_a_request_and_their_times_are_told(drive):
    now = [5.0]

    def clock():
        now[0] += 0.001
        return now[0]

    driver = drive(clock=clock, limits=SchedulingLimits(max_num_seqs=1), pipeline_depth=1)
    first = driver.submit("abc", 4, name="one", arrival_time=5.0)
    second = driver.submit("abcd", 4, n=2, priority=7, name="two", arrival_time=5.0)
    driver.run_until(lambda: first in driver.tokens and driver.tokens[first])
    one, two = driver.loop.list_requests()
    assert [change.state for change in one.history] == [PENDING, PREFILL, DECODE]
    assert (one.name, one.state, one.generated_tokens) == ("one", DECODE, (1,))
    assert (two.name, two.state, two.priority) == ("two", PENDING, 7)
    assert two.generated_tokens == (0, 0)
    driver.loop.inbox.cancel(second)
    driver.run()
    assert driver.loop.list_requests() == []
    ended = driver.loop.list_requests(include_ended=True)
    assert [info.state for info in ended] == [CANCELLED, COMPLETED]
    assert [info.finish_reason for info in ended] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    for request_id in (first, second):
        times = [change.at for change in driver.ends[request_id].history]
        assert times == sorted(times)
        assert times[0] == 5.0
    end = driver.ends[first]
    assert [change.state for change in end.history] == [PENDING, PREFILL, DECODE, COMPLETED]


def test_requests_are_listed_while_the_compute_plane_is_away(drive, fake_plane):
    driver = drive()
    driver.submit("abc", 50, name="it")
    driver.loop.step()
    fake_plane.kill()
    driver.run_until(lambda: not driver.links[-1])
    (info,) = driver.loop.list_requests()
    assert (info.name, info.state) == ("it", PENDING)
    answers = []
    driver.loop.inbox.inspect(answers.append)
    driver.loop.step()
    assert [[info.name for info in answer] for answer in answers] == [["it"]]


def test_only_the_last_requests_are_remembered_after_their_end(drive):
    driver = drive()
    ids = [driver.submit("ab", 1) for _ in range(80)]
    driver.run()
    ended = driver.loop.list_requests(include_ended=True)
    assert len(ended) == 64
    assert {info.request_id for info in ended} <= set(ids)
