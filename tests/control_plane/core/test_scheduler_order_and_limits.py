"""Who gets a row of a step, in which order, and how much of it and of the memory."""

from __future__ import annotations

import math

import pytest

from control_plane.core.scheduler import SchedulerConfig
from planes.errors import ConfigError


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


def test_a_prompt_gets_one_row_of_many_at_once(engine):
    """As it would if a row were free: of eight rows that costs decoding one."""
    e = engine(max_batch_size=8, prefill_patience=3, max_prefill_tokens=4)
    for request_id in range(1, 9):
        e.submit(request_id, prompt_len=1, max_tokens=50)
    while e.scheduler.get_stats().num_waiting:
        e.step()
    e.submit(9, prompt_len=8, max_tokens=50)
    outputs = [e.step() for _ in range(4)]
    assert [o.prefill_request_ids for o in outputs] == [[9], [9], [], []]
    assert [len(o.decode_request_ids) for o in outputs] == [7, 7, 8, 8]
    # Nobody's turn is skipped: rows go round.
    assert {1, 2, 3, 4, 5, 6, 7, 8} == {r for o in outputs[:2] for r in o.decode_request_ids}


def test_streams_that_fill_rows_and_tokens_are_not_stopped_by_a_prompt(engine):
    """A row kept for it in each step would be all the tokens that there are."""
    e = engine(max_batch_size=2, max_total_tokens=1, prefill_patience=1)
    for request_id in (1, 2):
        e.submit(request_id, prompt_len=1, max_tokens=50)
    while e.scheduler.get_stats().num_waiting:
        e.step()
    e.submit(3, prompt_len=8, max_tokens=50)
    assert [len(e.step().decode_request_ids) for _ in range(6)] == [1, 0] * 3


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
    ("prompt_len", "n", "urgent_len", "has_room"),
    [(24, 1, 3, True), (24, 1, 4, False), (23, 1, 4, True), (20, 3, 3, False), (20, 2, 3, True)],
)
def test_an_urgent_prompt_is_projected_beside_all_that_a_long_one_will_take(
    engine, prompt_len, n, urgent_len, has_room
):
    """Where there is no room for both, the long one gives way."""
    e = engine(num_blocks=8, block_size=4, memory_threshold=1.0, max_total_tokens=4)
    e.ask(1, [5] * prompt_len, n=n)
    e.step()
    e.ask(2, [5] * urgent_len, priority=-1)
    assert e.step().prefill_request_ids[0] == 2
    assert e.scheduler.get_stats().num_preemptions == (0 if has_room else 1)


def test_a_lone_request_runs_whatever_the_threshold(engine):
    e = engine(num_blocks=4, block_size=1, memory_threshold=0.01)
    e.submit(1, prompt_len=4, max_tokens=1)
    assert e.step().prefill_request_ids == [1]


def test_all_samples_of_a_lone_request_run_whatever_the_threshold(engine):
    e = engine(max_batch_size=3, memory_threshold=0.01, prefill_patience=1)
    e.ask(1, [5], max_tokens=50, n=4)
    e.step()  # three of them have a place
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
