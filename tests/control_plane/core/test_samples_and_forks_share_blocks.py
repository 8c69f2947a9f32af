"""Several samples of one prompt, and forks of a running request: blocks held once, tails copied."""

from __future__ import annotations

import pytest

from control_plane.core.batch import RowFailure, StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from planes.errors import SchedulerError, ValidationError


def test_the_samples_of_a_prompt_are_fed_by_one_row_and_hold_its_blocks_once(engine):
    e = engine()
    request = e.ask(1, [7] * 10, n=3)
    batch = e.send().batch
    assert (batch.query_lens, batch.sampled_rows) == ([10], [0, 0, 0])
    assert batch.sampled_slots == [start.slot for start in batch.starts]
    assert [start.sample_index for start in batch.starts] == [0, 1, 2]
    assert len({start.block_ids for start in batch.starts}) == 1
    assert e.used_blocks == 3
    e.commit()
    batch = e.send().batch
    # The half-full third block: two take a copy, the last keeps it.
    assert len(batch.copies) == 2
    assert {copy.source for copy in batch.copies} == {e.kv.get_block_table(3)[2]}
    assert {copy.logical_index for copy in batch.copies} == {2}
    assert e.used_blocks == 2 + 3
    e.commit()
    assert e.step().batch.copies == ()
    assert [len(sample.output_tokens) for sample in request.samples] == [3, 3, 3]


def test_a_prompt_that_ends_with_its_block_needs_no_copy(engine):
    e = engine()
    e.ask(1, [7] * 8, n=2)
    e.step()
    batch = e.step().batch
    assert (batch.copies, batch.new_block_counts) == ((), [1, 1])
    assert e.used_blocks == 2 + 2


def test_each_sample_ends_by_itself_and_the_request_with_the_last(engine):
    e = engine()
    request = e.ask(1, [7] * 3, n=2, max_tokens=3)
    output = e.send()
    events = e.scheduler.commit(StepResult(output.batch.step_id, [8, 0]))
    assert [(x.sample_index, x.new_token_ids, x.finish_reason, x.state) for x in events] == [
        (0, (8,), None, RequestState.DECODE),
        (1, (), FinishReason.STOP, RequestState.DECODE),
    ]
    e.in_flight.clear()
    e.step()
    e.send()
    (last,) = e.commit()
    assert (last.state, last.finish_reason) == (RequestState.COMPLETED, FinishReason.LENGTH)
    assert [s.finish_reason for s in request.samples] == [FinishReason.LENGTH, FinishReason.STOP]
    assert [s.output_tokens for s in request.samples] == [[8, 5, 5], []]
    assert e.used_blocks == 0


def test_a_request_ended_as_its_first_sample_did_whichever_was_the_last(engine):
    e = engine()
    request = e.ask(1, [7] * 3, n=2, max_tokens=2)
    output = e.send()
    e.scheduler.commit(StepResult(output.batch.step_id, [0, 8]))
    e.in_flight.clear()
    e.run()
    assert [s.finish_reason for s in request.samples] == [FinishReason.STOP, FinishReason.LENGTH]
    assert request.finish_reason is FinishReason.STOP


def test_samples_without_a_slot_or_a_place_in_the_step_come_later(engine):
    for limits in ({"max_num_seqs": 2}, {"max_batch_size": 2}):
        e = engine(**limits)
        request = e.ask(1, [7] * 5, n=4, max_tokens=3)
        assert len(e.step().batch.sampled_rows) == 2
        e.run()
        assert [s.output_tokens for s in request.samples] == [[5, 5, 5]] * 4
        assert request.state is RequestState.COMPLETED


def test_what_a_later_sample_finds_of_the_prompt_was_not_cached_for_the_request(engine):
    e = engine(max_num_seqs=1, prefix_cache=True)
    request = e.ask(1, [7] * 9, max_tokens=2, n=2)
    e.step()
    e.step()
    assert e.step().batch.positions == [8]  # the second sample has the prompt from the first
    assert request.cached_tokens == 0


def test_a_cancelled_request_gives_back_what_all_its_samples_hold(engine):
    e = engine(max_num_seqs=3)
    e.ask(1, [7] * 5, n=4)
    e.step()
    event = e.scheduler.cancel(1)
    assert event is not None
    assert event.state is RequestState.CANCELLED
    assert e.used_blocks == 0
    assert not e.scheduler.has_pending_work()


def test_a_sample_that_ended_before_its_request_was_cancelled_keeps_its_reason(engine):
    e = engine()
    request = e.ask(1, [7] * 3, max_tokens=9, n=2)
    e.step()
    assert e.scheduler.end_sample(1, 0, 1).finish_reason is FinishReason.STOP
    e.scheduler.cancel(1)
    reasons = [sample.finish_reason for sample in request.samples]
    assert reasons == [FinishReason.STOP, FinishReason.CANCELLED]


def test_a_failed_row_of_one_sample_fails_the_request(engine):
    e = engine()
    request = e.ask(1, [7] * 5, n=2)
    e.step()
    e.send()
    (event,) = e.commit(failures=(RowFailure(1, "NaN"),))
    assert (event.state, request.state) == (RequestState.FAILED, RequestState.FAILED)
    assert e.used_blocks == 0


@pytest.mark.parametrize("n", [0, 129, True, 1.5])
def test_a_number_of_samples_out_of_range_is_refused(n):
    with pytest.raises(ValidationError, match="n must be an integer in 1 to 128"):
        GenerationParams(n=n).validate()


def child_of(parent: Request, request_id: int, max_tokens: int = 8) -> Request:
    params = GenerationParams(max_tokens=max_tokens, seed=2)
    return Request(request_id, list(parent.input_tokens), params, parent.eos_token_ids)


def test_a_fork_goes_on_from_the_tokens_of_its_parent_in_the_same_blocks(engine):
    e = engine()
    parent = e.ask(1, [7] * 4)
    e.step()
    e.step()
    child = child_of(parent, 2)
    assert e.scheduler.fork(1, child) == 2
    assert child.output_tokens == parent.output_tokens == [5, 5]
    assert e.used_blocks == 2
    batch = e.step({1: 6, 2: 9}).batch
    assert (batch.query_lens, batch.positions) == ([1, 1], [5, 5])
    assert len(batch.copies) == 1  # the parent moves to a copy, the child keeps the block
    assert batch.starts[0].token_ids == (7, 7, 7, 7, 5, 5)
    assert e.used_blocks == 3
    e.run()
    assert (parent.output_tokens[:3], child.output_tokens[:3]) == ([5, 5, 6], [5, 5, 9])


def test_a_fork_of_a_parent_with_steps_in_flight_begins_where_it_is_known(engine):
    e = engine()
    parent = e.ask(1, [7] * 4)
    e.step()
    e.send()
    e.send()
    child = child_of(parent, 2)
    e.scheduler.fork(1, child)
    assert child.output_tokens == [5]
    while e.in_flight:
        e.commit({1: 6})
    e.step({1: 6, 2: 9})
    e.run()
    assert len(parent.output_tokens) == len(child.output_tokens) == 8


def test_a_fork_of_a_prompt_that_is_computed_in_part_computes_it_itself(engine):
    e = engine(block_size=16, max_total_tokens=4)
    parent = e.ask(1, [7] * 9, max_tokens=1)
    e.step()
    child = child_of(parent, 2, max_tokens=1)
    e.scheduler.fork(1, child)
    outputs = [e.step() for _ in range(4)]
    rows = [
        (request_id, position)
        for output in outputs
        for request_id, position in zip(
            output.prefill_request_ids, output.batch.positions, strict=True
        )
    ]
    assert rows == [(1, 4), (1, 8), (2, 0), (2, 3), (2, 7)]
    assert (parent.output_tokens, child.output_tokens) == ([5], [5])


def test_forks_hold_full_blocks_once_and_each_but_one_copies_the_half_full_tail(engine):
    e = engine()
    parent = e.ask(1, [7] * 9, max_tokens=20)
    e.step()
    for number in (2, 3):
        e.scheduler.fork(1, child_of(parent, number, max_tokens=20))
    before = e.kv.get_block_table(1)
    assert [e.kv.get_block_table(seq_id) for seq_id in (2, 3)] == [before, before]
    assert ref_counts(e, before) == [3, 3, 3]
    assert e.used_blocks == 3
    # Forks whose slot is not started yet begin a step later: copies name slots that are.
    copies = [copy for _ in range(2) for copy in e.step({1: 4, 2: 5, 3: 6}).batch.copies]
    tables = [e.kv.get_block_table(seq_id) for seq_id in (1, 2, 3)]
    assert [table[:2] for table in tables] == [before[:2]] * 3
    assert ref_counts(e, before) == [3, 3, 1]
    assert len({table[2] for table in tables}) == 3
    assert [(copy.source, copy.logical_index) for copy in copies] == [(before[2], 2)] * 2
    assert {copy.destination for copy in copies} == {t[2] for t in tables} - {before[2]}
    assert e.step().batch.copies == ()
    assert e.used_blocks == 2 + 3


def test_forks_whose_parent_has_gone_begin_in_a_step_without_rows(engine):
    e = engine()
    parent = e.ask(1, [7] * 6)
    e.step()
    children = [child_of(parent, number) for number in (2, 3)]
    for child in children:
        e.scheduler.fork(1, child)
    e.scheduler.cancel(1)
    batch = e.step().batch
    assert (batch.num_rows, len(batch.starts), batch.released) == (0, 2, (0,))
    assert [len(e.step().batch.copies) for _ in range(2)] == [1, 0]
    e.run()
    assert [len(child.output_tokens) for child in children] == [8, 8]


def test_what_a_fork_shares_stays_until_the_last_one_lets_it_go(engine):
    e = engine()
    parent = e.ask(1, [7] * 8, max_tokens=9)
    e.step()
    child = child_of(parent, 2, max_tokens=9)
    e.scheduler.fork(1, child)
    shared = e.kv.get_block_table(2)
    assert ref_counts(e, shared) == [2, 2]
    e.step()  # the prompt ends with its block: nothing to copy
    e.scheduler.cancel(1)
    assert ref_counts(e, shared) == [1, 1]
    e.run()
    assert len(child.output_tokens) == 9
    assert ref_counts(e, shared) == [0, 0]
    assert e.used_blocks == 0


def ref_counts(e, block_ids: list[int]) -> list[int]:
    """How many tables hold each block; `check_invariants` compares that with the pool's count."""
    e.kv.check_invariants()
    tables = [e.kv.get_block_table(seq_id) or [] for seq_id in range(1, 4)]
    return [sum(block_id in table for table in tables) for block_id in block_ids]


def test_a_fork_never_writes_over_a_block_that_others_may_find(engine):
    e = engine(prefix_cache=True, num_blocks=4, memory_threshold=1.0)
    parent = e.ask(1, [7] * 5, max_tokens=5)
    e.step()
    e.step()
    e.scheduler.fork(1, child_of(parent, 2, max_tokens=4))
    e.run()
    e.kv.check_invariants()
    again = e.ask(3, [7] * 5, max_tokens=1)
    e.run()
    assert again.cached_tokens == 4


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_fork_is_computed_anew_when_the_row_fails_that_filled_its_blocks(engine, is_cancelled):
    e = engine()
    parent = e.ask(1, [7] * 3)
    e.send()
    child = child_of(parent, 2)
    e.scheduler.fork(1, child)  # in the one block, which is being filled
    second = e.send()
    assert len(second.batch.copies) == 1  # the parent moves to a copy of what it filled
    if is_cancelled:
        e.scheduler.cancel(1)
    e.commit(failures=(RowFailure(0, "no numbers"),))
    e.commit()
    assert parent.state is (RequestState.CANCELLED if is_cancelled else RequestState.FAILED)
    assert child.output_tokens == []
    third = e.send()
    assert third.prefill_request_ids == [2]
    assert (third.batch.positions, third.batch.query_lens) == ([0], [3])
    e.commit()
    e.run()
    assert len(child.output_tokens) == 8
    assert e.used_blocks == 0


def test_a_fork_stays_when_the_row_fails_that_filled_its_blocks_in_an_earlier_step(engine):
    e = engine(block_size=16)
    parent = e.ask(1, [7] * 3)
    e.step()
    child = child_of(parent, 2)
    e.scheduler.fork(1, child)
    assert len(e.step().batch.copies) == 1  # the parent leaves to the child what it has filled
    e.send()
    e.commit(failures=(RowFailure(0, "no numbers"),))
    assert parent.state is RequestState.FAILED
    output = e.step()
    assert (output.decode_request_ids, output.prefill_request_ids) == ([2], [])


def test_a_fork_of_what_is_computed_anew_computes_it_itself(engine):
    e = engine(prefix_cache=True)
    prompt = list(range(1, 10))
    e.ask(1, prompt)
    parent = e.ask(2, prompt)  # in blocks that the first fills in the same step
    e.send()
    e.send()
    e.commit(failures=(RowFailure(0, "no numbers"),))
    child = child_of(parent, 3)
    e.scheduler.fork(2, child)
    e.commit()
    output = e.send()
    assert (output.decode_request_ids, output.prefill_request_ids) == ([], [2, 3])
    assert output.batch.positions[0] == 0
    e.commit()
    e.run()
    assert len(parent.output_tokens) == len(child.output_tokens) == 8


def test_a_tail_that_a_fork_has_copied_is_its_own_when_its_row_fails(engine):
    e = engine(block_size=16)
    parent = e.ask(1, [7] * 3, max_tokens=20)
    e.step()
    children = {number: child_of(parent, number, max_tokens=20) for number in (2, 3)}
    for child in children.values():
        e.scheduler.fork(1, child)
    copies = [copy.slot for _ in range(3) for copy in e.step().batch.copies]
    assert len(copies) == 2  # by the parent, and by the first child
    children[4] = child_of(parent, 4, max_tokens=20)
    output = e.send()
    e.scheduler.fork(2, children[4])
    e.commit(failures=(RowFailure(output.decode_request_ids.index(2), "no numbers"),))
    assert children[2].state is RequestState.FAILED
    output = e.send()
    assert (set(output.decode_request_ids), output.prefill_request_ids) == ({1, 3}, [4])
    assert output.batch.positions[-1] == 0
    e.commit()
    e.run()
    assert len(children[4].output_tokens) == 20


def test_what_cannot_be_forked_is_refused(engine):
    e = engine()
    parent, twins = e.ask(1, [7] * 4, max_tokens=2), e.ask(2, [7] * 4, n=2)
    for parent_id, child, message in (
        (9, child_of(parent, 3), "unknown or has ended"),
        (2, child_of(twins, 3), "one sample"),
        (1, Request(3, [1], GenerationParams(seed=0)), "prompt of its parent"),
    ):
        with pytest.raises(SchedulerError, match=message):
            e.scheduler.fork(parent_id, child)
    e.step()
    with pytest.raises(SchedulerError, match="has all its 1 tokens"):
        e.scheduler.fork(1, child_of(parent, 3, max_tokens=1))
