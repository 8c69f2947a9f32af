from __future__ import annotations

import math

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import (
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerProtocol,
)
from planes.errors import ConfigError, SchedulerError, ValidationError
from planes.errors import MemoryError as EngineMemoryError


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


def test_decode_rows_come_before_prefill_rows(engine):
    e = engine(max_batch_size=2)
    e.submit(1, prompt_len=2)
    e.step()
    e.submit(2, prompt_len=2)
    e.submit(3, prompt_len=2)
    output = e.step()
    assert (output.decode_request_ids, output.prefill_request_ids) == ([1], [2])
    assert output.batch.query_lens == [1, 2]


def test_a_prompt_longer_than_the_step_is_computed_in_chunks(engine):
    e = engine(max_total_tokens=4)
    e.submit(1, prompt_len=10)
    batches = [e.step().batch for _ in range(3)]
    assert [b.query_lens for b in batches] == [[4], [4], [2]]
    assert [b.positions for b in batches] == [[0], [4], [8]]
    assert [b.sampled_rows for b in batches] == [[], [], [0]]
    assert [len(b.starts) for b in batches] == [1, 0, 0]


def test_prompts_are_computed_in_order_of_arrival_within_the_token_budget(engine):
    e = engine(max_total_tokens=6)
    for request_id in (1, 2, 3):
        e.submit(request_id, prompt_len=4)
    assert e.step().prefill_request_ids == [1, 2]
    output = e.step()
    assert output.decode_request_ids == [1]
    assert output.prefill_request_ids == [2, 3]
    assert output.batch.query_lens == [1, 2, 3]


def test_a_long_prompt_beside_a_running_stream_is_computed_in_chunks_of_the_limit(engine):
    e = engine(max_prefill_tokens=4)
    e.submit(1, prompt_len=1, max_tokens=50)
    e.step()
    e.submit(2, prompt_len=10, max_tokens=50)
    e.submit(3, prompt_len=1, max_tokens=50)
    batches = [e.step().batch for _ in range(3)]
    assert [b.query_lens for b in batches] == [[1, 4], [1, 4], [1, 2, 1]]


def test_those_served_longest_ago_decode_first_when_not_all_fit(engine):
    e = engine(max_batch_size=2)
    for request_id in (1, 2, 3, 4, 5):
        e.submit(request_id, prompt_len=1, max_tokens=100)
    while e.scheduler.get_stats().num_waiting:
        e.step()
    served = [e.step().decode_request_ids for _ in range(10)]
    assert all(len(ids) == 2 for ids in served[1:])
    flat = [request_id for ids in served[1:] for request_id in ids]
    for start in range(len(flat) - 5):
        assert len(set(flat[start : start + 5])) == 5


def test_a_prompt_gets_a_row_after_a_bounded_number_of_steps_of_busy_decoding(engine):
    e = engine(max_batch_size=2, prefill_patience=3)
    for request_id in (1, 2):
        e.submit(request_id, prompt_len=1, max_tokens=50)
    e.step()
    e.submit(3, prompt_len=1, max_tokens=50)
    assert [e.step().prefill_request_ids for _ in range(4)] == [[], [], [], [3]]


def test_a_long_prompt_gets_a_share_of_the_tokens_again_and_again(engine):
    e = engine(max_batch_size=8, max_total_tokens=4, prefill_patience=2)
    for request_id in (1, 2, 3, 4):
        e.submit(request_id, prompt_len=1, max_tokens=50)
    e.step()
    e.submit(5, prompt_len=3, max_tokens=50)
    outputs = [e.step() for _ in range(9)]
    assert [o.prefill_request_ids for o in outputs] == [[], [], [5]] * 3
    assert all(o.batch.num_tokens == 4 for o in outputs)


def test_a_prompt_waits_no_shorter_because_another_has_waited_before(engine):
    e = engine(max_batch_size=2, prefill_patience=3)
    for request_id in (1, 2):
        e.submit(request_id, prompt_len=1, max_tokens=50)
    e.step()
    e.submit(3, prompt_len=1)
    e.step()
    e.step()
    e.scheduler.cancel(3)
    e.step()
    e.submit(4, prompt_len=1)
    assert [e.step().prefill_request_ids for _ in range(4)] == [[], [], [], [4]]


@pytest.mark.parametrize("max_total_tokens", [1, 2, 3])
def test_a_prompt_gets_its_share_also_of_a_step_of_few_tokens(engine, max_total_tokens):
    e = engine(max_total_tokens=max_total_tokens, prefill_patience=2)
    for request_id in range(1, max_total_tokens + 1):
        e.submit(request_id, prompt_len=1, max_tokens=50)
    while e.scheduler.get_stats().num_waiting:
        e.step()
    e.submit(9, prompt_len=2, max_tokens=1)
    outputs = [e.step() for _ in range(6)]
    assert [o.prefill_request_ids for o in outputs] == [[], [], [9]] * 2


def test_room_reserved_for_a_prompt_that_cannot_use_it_goes_to_decoding(engine):
    e = engine(num_blocks=4, block_size=1, max_batch_size=1, prefill_patience=1)
    e.submit(1, prompt_len=1, max_tokens=4)
    e.step()
    e.submit(2, prompt_len=4, max_tokens=1)
    for _ in range(3):
        assert e.step().decode_request_ids == [1]
    assert e.step().prefill_request_ids == [2]


def test_a_prompt_does_not_take_the_block_that_a_row_in_its_place_needs_next(engine):
    e = engine(
        num_blocks=2, block_size=2, memory_threshold=1.0, max_total_tokens=1, prefill_patience=1
    )
    e.submit(1, prompt_len=1, max_tokens=4)
    e.step()
    e.submit(2, prompt_len=1, max_tokens=1)
    assert [e.step().decode_request_ids for _ in range(3)] == [[1]] * 3
    assert e.step().prefill_request_ids == [2]
    assert e.scheduler.get_stats().num_preemptions == 0


def test_a_prompt_does_not_take_the_block_to_which_a_sample_will_copy_its_tail(engine):
    e = engine(
        num_blocks=3, block_size=4, memory_threshold=1.0, max_total_tokens=1, prefill_patience=1
    )
    e.ask(1, [5], max_tokens=4)
    e.step()
    e.ask(2, [6], max_tokens=2, n=2)
    e.ask(3, [7], max_tokens=1)
    assert e.step().decode_request_ids == [1]
    assert e.step().prefill_request_ids == [2]
    assert [e.step().decode_request_ids for _ in range(3)] == [[1], [2], [2]]
    assert e.scheduler.get_stats().num_preemptions == 0


def test_no_more_requests_run_than_max_num_seqs(engine):
    e = engine(max_num_seqs=2)
    for request_id in (1, 2, 3):
        e.submit(request_id, prompt_len=1, max_tokens=2)
    e.step()
    e.step()
    stats = e.scheduler.get_stats()
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    assert e.step().prefill_request_ids == [3]


def test_no_more_requests_run_than_the_plane_has_slots(engine):
    e = engine(max_slots=1)
    e.submit(1, prompt_len=1)
    e.submit(2, prompt_len=1)
    assert e.step().prefill_request_ids == [1]
    assert e.scheduler.get_stats().num_waiting == 1


def test_slots_that_are_more_than_max_num_seqs_are_not_used(engine):
    e = engine(max_num_seqs=1, max_slots=5)
    e.submit(1, prompt_len=1)
    e.submit(2, prompt_len=1)
    assert e.step().prefill_request_ids == [1]
    assert e.scheduler.get_stats().num_running == 1


def test_admission_stops_while_projected_use_would_pass_the_threshold(engine):
    e = engine(num_blocks=10, block_size=1, memory_threshold=0.5)
    e.submit(1, prompt_len=2, max_tokens=3)
    e.submit(2, prompt_len=2, max_tokens=2)
    assert e.step().prefill_request_ids == [1]
    while e.scheduler.get_stats().num_running:
        assert e.step().prefill_request_ids == []
    assert e.step().prefill_request_ids == [2]


def test_the_blocks_a_prompt_under_way_waits_for_count_as_projected_use(engine):
    e = engine(num_blocks=9, block_size=2, memory_threshold=1.0, max_total_tokens=6)
    for request_id in (1, 2):
        e.submit(request_id, prompt_len=1)
    e.submit(3, prompt_len=11, max_tokens=2)
    e.submit(4, prompt_len=1, max_tokens=2)
    assert e.step().batch.query_lens == [1, 1, 4]
    assert e.step().batch.query_lens == [1, 1, 4]
    # One block is free: 3 needs two for the rest of its prompt, 4 would need only that one.
    output = e.step()
    assert (output.decode_request_ids, output.prefill_request_ids) == ([1, 2], [])
    assert e.used_blocks == 8


def test_a_part_of_a_block_above_the_threshold_is_not_to_be_had(engine):
    e = engine(num_blocks=4, block_size=4, memory_threshold=0.9)  # 3.6 blocks
    e.submit(1, prompt_len=4)
    e.submit(2, prompt_len=4)  # each has a block, and one for its next token
    assert e.step().prefill_request_ids == [1]


@pytest.mark.parametrize(
    ("prompt_len", "n", "urgent_len", "first"),
    [(24, 1, 3, 2), (24, 1, 4, 1), (23, 1, 4, 2), (20, 3, 3, 1), (20, 2, 3, 2)],
)
def test_an_urgent_prompt_is_projected_beside_all_that_a_long_one_will_take(
    engine, prompt_len, n, urgent_len, first
):
    e = engine(num_blocks=8, block_size=4, memory_threshold=1.0, max_total_tokens=4)
    e.ask(1, [5] * prompt_len, n=n)
    e.step()
    e.ask(2, [5] * urgent_len, priority=-1)
    assert e.step().prefill_request_ids[0] == first


def test_a_lone_request_runs_whatever_the_threshold(engine):
    e = engine(num_blocks=4, block_size=1, memory_threshold=0.01)
    e.submit(1, prompt_len=4, max_tokens=1)
    assert e.step().prefill_request_ids == [1]


def test_all_samples_of_a_lone_request_run_whatever_the_threshold(engine):
    e = engine(max_batch_size=3, memory_threshold=0.01, prefill_patience=1)
    e.ask(1, [5], max_tokens=50, n=4)
    e.step()  # three of them have a place
    e.step()
    assert e.step().prefill_request_ids == [1]
    assert e.scheduler.get_stats().num_running == 4


def test_blocks_of_others_that_a_prompt_shares_are_not_counted_twice(engine):
    e = engine(num_blocks=4, block_size=4, memory_threshold=1.0, prefix_cache=True)
    e.ask(1, [5] * 9)
    e.ask(2, [5] * 9)  # of its three blocks two are there
    assert e.step().prefill_request_ids == [1, 2]


def test_samples_to_come_count_as_projected_use(engine):
    e = engine(num_blocks=6, block_size=4, memory_threshold=1.0)
    e.ask(1, [5] * 9, max_tokens=2)
    e.ask(2, [5] * 3, n=4)  # a block for each, beside the three of the first
    assert e.step().prefill_request_ids == [1]
    e.step()
    assert e.step().prefill_request_ids == [2]


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch_size", 0),
        ("max_num_seqs", -1),
        ("max_model_len", 1.5),
        ("max_total_tokens", True),
        ("max_slots", 0),
        ("max_prefill_tokens", 0),
        ("prefill_patience", 0),
        ("memory_threshold", 0.0),
        ("memory_threshold", 1.5),
        ("memory_threshold", math.nan),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        SchedulerConfig(**{field: value})
    assert caught.value.field == field


def test_the_scheduler_is_one_of_those_the_engine_accepts(engine):
    scheduler = engine().scheduler
    assert isinstance(scheduler, Scheduler)
    assert isinstance(scheduler, SchedulerProtocol)
