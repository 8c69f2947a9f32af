"""A request's way through the scheduler: what its steps carry, what ends it, what is refused."""

from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import RequestOutput, Scheduler, SchedulerProtocol
from planes.errors import MemoryError as EngineMemoryError
from planes.errors import SchedulerError, ValidationError


def test_a_request_goes_from_pending_through_prefill_and_decode_to_completed(engine):
    e = engine()
    request = e.submit(1, prompt_len=3, max_tokens=2)
    assert request.state is RequestState.PENDING
    e.send()
    assert request.state is RequestState.PREFILL
    assert e.commit({1: 6}) == [RequestOutput(1, (6,), RequestState.DECODE)]
    assert request.state is RequestState.DECODE
    e.send()
    assert e.commit({1: 7}) == [RequestOutput(1, (7,), RequestState.COMPLETED, FinishReason.LENGTH)]
    assert request.output_tokens == [6, 7]
    assert e.scheduler.get_completed() == [request]
    assert e.scheduler.get_completed() == []
    assert not e.scheduler.has_pending_work()
    assert e.used_blocks == 0


def test_the_first_row_starts_the_slot_with_all_tokens_and_the_whole_table(engine):
    e = engine(block_size=4)
    e.submit(1, prompt_len=6)
    batch = e.send().batch
    (start,) = batch.starts
    assert start.token_ids == (5,) * 6
    assert start.num_prompt_tokens == 6
    assert len(start.block_ids) == 2
    assert batch.slots == [start.slot]
    assert (batch.positions, batch.query_lens, batch.sampled_rows) == ([0], [6], [0])
    assert (batch.new_block_counts, batch.new_block_ids) == ([0], [])


def test_only_new_blocks_travel_once_a_sequence_has_started(engine):
    e = engine(block_size=4)
    e.submit(1, prompt_len=3)
    e.step()
    counts = []
    for _ in range(6):
        batch = e.step().batch
        assert not batch.starts
        assert sum(batch.new_block_counts) == len(batch.new_block_ids)
        counts.append(batch.new_block_counts[0])
    assert counts == [0, 1, 0, 0, 0, 1]


def test_an_end_token_stops_a_request_and_is_not_part_of_its_output(engine):
    e = engine()
    request = e.submit(1, prompt_len=1)
    e.step()
    e.send()
    assert e.commit({1: 0}) == [RequestOutput(1, (), RequestState.COMPLETED, FinishReason.STOP)]
    assert request.output_tokens == [5]


def test_an_ignored_end_token_is_output_like_any_other(engine):
    e = engine()
    request = e.submit(1, prompt_len=1, max_tokens=2, ignore_eos=True)
    e.step({1: 0})
    e.step({1: 0})
    assert request.output_tokens == [0, 0]
    assert request.finish_reason is FinishReason.LENGTH


def test_released_slots_are_listed_in_the_next_batch(engine):
    e = engine()
    e.submit(1, prompt_len=1, max_tokens=1)
    slot = e.step().batch.slots[0]
    assert e.scheduler.schedule() is None
    e.submit(2, prompt_len=1, max_tokens=2)
    batch = e.step().batch
    assert batch.released == (slot,)
    assert batch.starts[0].slot == slot
    assert e.step().batch.released == ()


def test_steps_are_numbered_one_after_the_other(engine):
    e = engine()
    e.scheduler.lose_epoch(last_step=41)
    e.submit(1, prompt_len=1)
    assert [e.step().batch.step_id for _ in range(3)] == [42, 43, 44]


def test_a_prompt_and_completion_beyond_max_model_len_are_refused_with_both_numbers(engine):
    e = engine(max_model_len=10)
    e.submit(1, prompt_len=4, max_tokens=6)
    with pytest.raises(ValidationError, match=r"at most 6 after a prompt of 4 .* got 7"):
        e.submit(2, prompt_len=4, max_tokens=7)


def test_an_empty_prompt_is_refused(engine):
    with pytest.raises(ValidationError, match="prompt must have at least 1 token"):
        engine().submit(1, prompt_len=0)


def test_what_cannot_fit_even_alone_is_refused_at_once(engine):
    e = engine(num_blocks=4, block_size=4)
    with pytest.raises(EngineMemoryError, match="needs 5 KV blocks of 4 tokens, the pool has 4"):
        e.submit(1, prompt_len=10, max_tokens=8)
    request = e.submit(2, prompt_len=10, max_tokens=7)  # the last token is never computed
    while e.scheduler.has_pending_work():
        e.step()
    assert len(request.output_tokens) == 7


def test_a_request_is_added_only_once(engine):
    e = engine()
    request = e.submit(1, prompt_len=1, max_tokens=1)
    with pytest.raises(SchedulerError, match="known already"):
        e.scheduler.add_request(request)
    e.step()
    with pytest.raises(SchedulerError, match="completed, not pending"):
        e.scheduler.add_request(request)


def test_a_constrained_request_has_a_constraint_for_each_sample(engine):
    e = engine()
    params = GenerationParams(seed=1, n=2)
    request = Request(1, [7], params, frozenset({0}), constraints=(object(),))
    with pytest.raises(SchedulerError, match=r"has 1 constraints, .* its 2 samples"):
        e.scheduler.add_request(request)
    assert not e.scheduler.has_pending_work()


def test_a_request_that_brings_tokens_along_continues_after_them(engine):
    e = engine()
    request = e.submit(1, prompt_len=2, max_tokens=3)
    e.scheduler.cancel(1)
    request.state = RequestState.PENDING
    request.output_tokens = [8, 9]
    e.scheduler.add_request(request)
    (start,) = e.step({1: 7}).batch.starts
    assert (start.token_ids, start.num_prompt_tokens) == ((5, 5, 8, 9), 2)
    assert request.output_tokens == [8, 9, 7]


def test_samples_that_begin_with_tokens_of_the_first_have_none_of_them(engine):
    e = engine()
    params = GenerationParams(max_tokens=3, seed=1, n=2)
    request = Request(1, [7, 7], params, frozenset({0}), output_tokens=[8])
    e.scheduler.add_request(request)
    batch = e.step().batch
    starts = {start.sample_index: start.token_ids for start in batch.starts}
    assert starts == {0: (7, 7, 8), 1: (7, 7)}
    assert batch.query_lens == [3, 2]  # nothing of the first row is for the second
    e.run()
    assert [sample.output_tokens for sample in request.samples] == [[8, 5, 5], [5, 5, 5]]


def test_the_scheduler_is_one_of_those_the_engine_accepts(engine):
    scheduler = engine().scheduler
    assert isinstance(scheduler, Scheduler)
    assert isinstance(scheduler, SchedulerProtocol)
