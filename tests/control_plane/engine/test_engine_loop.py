"""The engine loop over a real link to a fake compute plane, turn by turn on the test's thread."""

from __future__ import annotations

import threading

import grpc
import pytest

from control_plane.config import SchedulingLimits
from control_plane.core.request import FinishReason, RequestState
from control_plane.engine.bring_up import connect, learn
from control_plane.engine.compute_client import ComputeClient
from control_plane.engine.compute_session import MAX_RESUMES_WITHOUT_REPLY
from control_plane.errors import (
    ComputeUnavailableError,
    FencedError,
    PlaneMismatchError,
    QueueFullError,
    RequestFailedError,
)
from planes.errors import ValidationError


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_requests_in_one_batch_get_the_text_they_get_alone(drive, fake_plane, expected, depth):
    fake_plane.max_batches_in_flight = depth
    driver = drive(pipeline_depth=depth)
    prompts = ["a", "hello there", "block" * 9, "xyz"]
    ids = [driver.submit(prompt, 9 + i, seed=i) for i, prompt in enumerate(prompts)]
    driver.run()
    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        assert driver.text(request_id) == expected(prompt, 9 + i, i)
        assert driver.ends[request_id].finish_reason is FinishReason.LENGTH
    assert driver.loop.memory_stats.used_blocks == 0


def test_two_batches_are_under_way_when_pipelined_and_one_when_not(drive, fake_plane):
    for depth in (1, 2):
        fake_plane.batches.clear()
        driver = drive(pipeline_depth=depth)
        fake_plane.may_run.clear()
        driver.submit("abc", 4)
        driver.send()
        assert len(driver.client.under_way) == depth
        fake_plane.may_run.set()
        driver.run()
        driver.loop.close()


def test_a_third_batch_is_under_way_where_the_device_runs_dry(drive, fake_plane, expected):
    fake_plane.max_batches_in_flight = 3
    driver = drive(pipeline_depth=3)
    request_id = driver.submit("abc", 40)
    for _ in range(3):
        driver.loop.step()
    driver.send()
    assert len(driver.client.under_way) == 2
    run = fake_plane.run

    def run_late(batch):
        output = run(batch)
        output.timings.idle_us = output.timings.execute_us = 100
        return output

    fake_plane.run = run_late
    for _ in range(3):
        driver.loop.step()
    driver.send()
    assert len(driver.client.under_way) == 3
    driver.run()
    assert driver.text(request_id) == expected("abc", 40, 0)


def test_a_small_pool_preempts_and_changes_no_text(drive, fake_plane, expected):
    fake_plane.num_blocks = 8
    driver = drive(limits=SchedulingLimits(memory_threshold=1.0))
    ids = [driver.submit(f"prompt {i}", 16, seed=i) for i in range(4)]
    driver.run()
    for i, request_id in enumerate(ids):
        assert driver.text(request_id) == expected(f"prompt {i}", 16, i)
    assert driver.loop.metrics.num_preemptions > 0
    assert driver.loop.memory_stats.used_blocks == 0


def test_a_lost_compute_plane_costs_no_token_and_changes_none(drive, fake_plane, expected):
    driver = drive()
    ids = [driver.submit(f"stream {i}", 20, seed=i) for i in range(3)]
    driver.run_until(lambda: all(len(driver.tokens.get(i, ())) > 5 for i in ids))
    assert driver.loop.metrics.num_plane_losses == 0
    fake_plane.kill()
    fake_plane.start()
    driver.run()
    for i, request_id in enumerate(ids):
        assert driver.text(request_id) == expected(f"stream {i}", 20, i)
    assert driver.links == [True, False, True]
    assert driver.loop.metrics.num_plane_losses == 1
    assert fake_plane.take_overs == [False, False]
    assert driver.loop.memory_stats.used_blocks == 0


def test_a_broken_stream_to_a_living_plane_is_mended_and_the_loop_hears_nothing(
    drive, fake_plane, expected
):
    driver = drive()
    request_id = driver.submit("abc", 20)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 3)
    fake_plane.break_stream()
    driver.run()
    assert driver.text(request_id) == expected("abc", 20)
    assert (fake_plane.num_resumes, fake_plane.take_overs, driver.links) == (1, [False], [True])


def test_a_stream_that_breaks_often_is_mended_as_long_as_replies_come_in_between(
    drive, fake_plane, expected
):
    driver, breaks = drive(), MAX_RESUMES_WITHOUT_REPLY + 3
    request_id = driver.submit("abc", 4 * breaks)
    for number in range(breaks):
        driver.run_until(lambda n=number: len(driver.tokens.get(request_id, ())) >= 2 * n + 2)
        fake_plane.break_stream()
        driver.run_until(lambda n=number: fake_plane.num_resumes > n)
    driver.run()
    assert driver.text(request_id) == expected("abc", 4 * breaks)
    assert (fake_plane.num_resumes, driver.links) == (breaks, [True])


def test_a_stream_that_never_brings_a_reply_is_not_mended_for_ever(drive, fake_plane):
    fake_plane.kill()
    fake_plane.Execute = lambda *_: iter(())  # ends the stream at once
    fake_plane.start()
    driver = drive()
    driver.submit("abc", 20)
    driver.run_until(lambda: driver.links[-1:] == [False])
    assert fake_plane.num_resumes == MAX_RESUMES_WITHOUT_REPLY


def test_what_breaks_the_stream_by_its_content_is_not_sent_again(drive, fake_plane):
    def refuse(batches, context):
        next(batches)
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max")

    fake_plane.kill()
    fake_plane.Execute = refuse
    fake_plane.start()
    driver = drive()
    driver.submit("abc", 20)
    driver.run_until(lambda: driver.links[-1:] == [False])
    assert fake_plane.num_resumes == 0


def test_a_new_plane_with_another_model_is_refused(drive, fake_plane):
    driver = drive()
    driver.submit("abc", 20)
    driver.loop.step()
    fake_plane.kill()
    fake_plane.model = "other"
    fake_plane.start()
    with pytest.raises(PlaneMismatchError, match="another model: 'other', it was 'fake'"):
        driver.run()


def test_a_plane_replaced_before_it_was_opened_is_only_another_one_to_learn(
    compute_address, fake_plane
):
    client = ComputeClient(compute_address, controller="test")
    client.describe()
    fake_plane.model = "other"
    assert learn(client, SchedulingLimits()).plane.model == "other"
    assert client.open() == 0
    client.shut_down()


def test_a_controller_whose_session_was_taken_stops(drive, fake_plane):
    driver = drive()
    driver.submit("abc", 50)
    driver.loop.step()
    fake_plane.other_session = 9
    with pytest.raises(FencedError):
        driver.run()


def test_a_session_whose_opening_was_not_heard_of_is_not_taken_for_somebody_elses(
    drive, fake_plane, expected
):
    driver = drive()
    request_id = driver.submit("hello", 40)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) > 3)
    fake_plane.loses_answer_to_open = True
    driver.lose_link()
    driver.run()
    assert driver.text(request_id) == expected("hello", 40)
    assert fake_plane.session == 3


def test_a_row_that_fails_fails_its_request_alone(drive, fake_plane, expected):
    fake_plane.poisoned_prompt = b"bad"
    driver = drive()
    bad, good = driver.submit("bad one"), driver.submit("good one")
    driver.run()
    assert isinstance(driver.ends[bad].error, RequestFailedError)
    assert "NaN logits" in driver.ends[bad].error.message
    assert driver.text(good) == expected("good one", 12)


def test_a_refused_batch_fails_its_requests_and_the_next_ones_work(drive, fake_plane, expected):
    driver = drive()
    fake_plane.refuse_step = 3
    first = driver.submit("first")
    driver.run()
    assert "INVALID_BATCH at slots: planted" in driver.ends[first].error.message
    second = driver.submit("second")
    driver.run()
    assert driver.text(second) == expected("second", 12)


def test_a_cancelled_request_frees_its_blocks(drive):
    driver = drive()
    request_id = driver.submit("long" * 10, 200)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 3)
    driver.loop.inbox.cancel(request_id)
    driver.run()
    assert driver.ends[request_id].finish_reason is FinishReason.CANCELLED
    assert driver.loop.memory_stats.used_blocks == 0
    assert driver.loop.metrics.cancelled_requests == 1


def test_a_request_cancelled_while_the_plane_is_away_has_no_blocks(drive, fake_plane):
    driver = drive()
    request_id = driver.submit("long" * 10, 200)
    driver.loop.step()
    fake_plane.kill()
    driver.run_until(lambda: not driver.links[-1])
    driver.loop.inbox.cancel(request_id)
    driver.loop.step()
    assert driver.ends[request_id].finish_reason is FinishReason.CANCELLED
    assert driver.loop.memory_stats.used_blocks == 0


def test_an_end_token_ends_the_request_and_is_not_part_of_it(drive, fake_plane):
    fake_plane.answer = b"yes."
    driver = drive()
    request_id = driver.submit("well?", 50)
    driver.run()
    assert driver.text(request_id) == "yes."
    assert driver.ends[request_id].finish_reason is FinishReason.STOP


def test_a_full_queue_refuses_with_a_typed_error(drive):
    driver = drive(limits=SchedulingLimits(max_num_seqs=1), max_queued_requests=2)
    first = driver.submit("a", 30)
    driver.loop.step()  # it runs now and waits no more
    others = [driver.submit("a") for _ in range(3)]
    driver.run()
    assert isinstance(driver.ends[others[2]].error, QueueFullError)
    assert all(driver.ends[i].error is None for i in (first, *others[:2]))
    assert driver.loop.metrics.total_requests == 3


def test_what_the_scheduler_refuses_is_published_as_that_error(drive):
    driver = drive()
    request_id = driver.submit("", 5)
    driver.run()
    assert isinstance(driver.ends[request_id].error, ValidationError)
    assert driver.loop.metrics.total_requests == 0


def test_all_news_of_a_turn_are_published_at_once(drive):
    driver = drive(pipeline_depth=1)
    ids = [driver.submit(f"p{i}", 3) for i in range(5)]
    driver.run()
    with_tokens = [turn for turn in driver.news if any(u.new_token_ids for u in turn)]
    assert len(with_tokens) == 3
    assert all({u.request_id for u in turn if u.new_token_ids} == set(ids) for turn in with_tokens)


def test_requests_outlive_the_plane_only_for_the_grace(drive, fake_plane):
    now = [100.0]
    driver = drive(compute_grace_s=30.0, clock=lambda: now[0])
    request_id = driver.submit("abc", 50)
    driver.loop.step()
    now[0] += 25.0
    fake_plane.kill()
    driver.run_until(lambda: not driver.links[-1])
    now[0] += 29.0
    driver.loop.step()
    assert request_id not in driver.ends
    now[0] += 2.0
    driver.loop.step()
    assert isinstance(driver.ends[request_id].error, ComputeUnavailableError)
    assert driver.ends[request_id].history[-1].state is RequestState.FAILED
    late = driver.submit("late")
    driver.loop.step()
    assert isinstance(driver.ends[late].error, ComputeUnavailableError)
    assert driver.loop.metrics.total_requests == 1


def test_a_step_that_never_ends_is_a_lost_link(drive, fake_plane, expected):
    now = [0.0]
    driver = drive(clock=lambda: now[0])
    request_id = driver.submit("abc", 6)
    fake_plane.may_run.clear()
    driver.send()
    now[0] = 1000.0
    driver.loop.step()
    assert driver.links == [True, False]
    driver.send()  # it is open again, and not well before it has answered
    assert (driver.links, len(driver.client.under_way)) == ([True, False], 2)
    driver.lose_link()
    assert driver.links == [True, False, False]  # what it holds may go elsewhere now
    fake_plane.may_run.set()
    driver.run()
    assert driver.text(request_id) == expected("abc", 6)


def test_timings_follow_the_engine_clock(drive):
    now = [10.0]

    def clock():
        now[0] += 0.001
        return now[0]

    driver = drive(clock=clock)
    request_id = driver.submit("abc", 5)
    driver.run()
    timings = driver.ends[request_id].timings
    assert 0 < timings.queue_s < timings.time_to_first_token_s < timings.total_s


def test_limits_are_lowered_to_those_of_the_plane(drive, fake_plane):
    fake_plane.context_length = 100
    fake_plane.max_rows = 3
    fake_plane.max_slots = 5
    limits = drive().connected.limits
    assert (limits.max_model_len, limits.max_batch_size, limits.max_num_seqs) == (100, 3, 5)


def test_another_protocol_version_is_refused(compute_address, fake_plane):
    fake_plane.protocol_version = 2
    client = ComputeClient(compute_address, controller="test")
    with pytest.raises(PlaneMismatchError, match="protocol version 2"):
        connect(client, SchedulingLimits(), stop=threading.Event())
    client.shut_down()


def test_the_seed_and_only_new_blocks_travel(drive, fake_plane):
    driver = drive()
    driver.submit("x" * 10, 20, seed=2**64 - 1)
    driver.run()
    starts = [start for batch in fake_plane.batches for start in batch.starts]
    assert [start.sampling.seed for start in starts] == [2**64 - 1]
    assert [len(start.block_ids) for start in starts] == [3]
    new = [len(batch.new_block_ids) for batch in fake_plane.batches[1:]]
    assert max(new) == 1
    assert sum(new) == 5  # 29 tokens with KV, the last one has none: 8 blocks


@pytest.mark.parametrize("depth", [1, 2])
def test_every_batch_acknowledges_the_last_output_received(drive, fake_plane, depth):
    driver = drive(pipeline_depth=depth)
    driver.submit("abc", 12)
    driver.run()
    behind = [batch.step_id - batch.acked_step for batch in fake_plane.batches]
    assert behind == [1] + [depth] * (len(behind) - 1)
