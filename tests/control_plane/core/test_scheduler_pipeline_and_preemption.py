from __future__ import annotations

import pytest

from control_plane.core.batch import RowFailure, StepResult
from control_plane.core.request import FinishReason, RequestState
from control_plane.core.scheduler import RequestOutput
from planes.errors import SchedulerError


def test_a_row_is_scheduled_while_its_newest_token_is_still_unknown(engine):
    e = engine()
    request = e.submit(1, prompt_len=3, max_tokens=3)
    e.send()
    batch = e.send().batch
    assert (batch.positions, batch.query_lens, batch.starts) == ([3], [1], ())
    assert e.commit({1: 6})[0].new_token_ids == (6,)
    assert e.commit({1: 7})[0].new_token_ids == (7,)
    assert request.output_tokens == [6, 7]


def test_tokens_on_their_way_count_toward_max_tokens(engine):
    e = engine()
    e.submit(1, prompt_len=3, max_tokens=2)
    e.send()
    e.send()
    assert e.scheduler.schedule() is None
    e.commit()
    assert e.scheduler.schedule() is None
    assert e.commit()[0].finish_reason is FinishReason.LENGTH
    assert e.used_blocks == 0


def test_a_row_in_flight_behind_an_end_token_is_discarded(engine):
    e = engine()
    request = e.submit(1, prompt_len=3)
    e.send()
    e.send()
    assert e.commit({1: 0}) == [RequestOutput(1, (), RequestState.COMPLETED, FinishReason.STOP)]
    assert e.used_blocks == 1  # step 2 may still write it
    assert e.scheduler.has_pending_work()
    assert e.scheduler.schedule() is None
    assert e.commit({1: 9}) == []
    assert request.output_tokens == []
    assert e.used_blocks == 0
    assert not e.scheduler.has_pending_work()


def test_a_draining_slot_is_not_given_to_another_request(engine):
    e = engine(max_num_seqs=1)
    e.submit(1, prompt_len=3)
    e.submit(2, prompt_len=3)
    e.send()
    e.send()
    e.commit({1: 0})
    assert e.scheduler.schedule() is None
    e.commit()
    batch = e.send().batch
    assert batch.released == (batch.starts[0].slot,)


def test_cancelling_frees_the_blocks_at_once_when_nothing_is_in_flight(engine):
    e = engine()
    request = e.submit(1, prompt_len=3)
    e.step()
    assert e.scheduler.cancel(1) == RequestOutput(
        1, (), RequestState.CANCELLED, FinishReason.CANCELLED
    )
    assert e.used_blocks == 0
    assert e.scheduler.cancel(1) is None
    assert e.scheduler.get_completed() == [request]
    assert not e.scheduler.has_pending_work()


def test_cancelling_with_a_step_in_flight_frees_the_blocks_at_its_commit(engine):
    e = engine()
    request = e.submit(1, prompt_len=3)
    e.step()
    e.send()
    assert e.scheduler.cancel(1) is not None
    assert e.used_blocks == 1
    assert e.scheduler.cancel(1) is None
    assert e.commit({1: 9}) == []
    assert request.output_tokens == [5]
    assert e.used_blocks == 0


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(engine):
    e = engine()
    e.submit(1, prompt_len=3)
    assert e.scheduler.cancel(1) is not None
    assert e.scheduler.schedule() is None
    assert e.scheduler.cancel(99) is None


def test_out_of_blocks_the_youngest_is_preempted_and_starts_again_with_all_its_tokens(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0)
    old = e.submit(1, prompt_len=2, max_tokens=5)
    young = e.submit(2, prompt_len=2, max_tokens=3)
    e.step({1: 6, 2: 7})
    assert e.used_blocks == 4
    e.step({1: 6, 2: 8})
    assert e.used_blocks == 6
    output = e.send()
    assert output.decode_request_ids == [1]
    assert len(output.batch.released) == 1
    assert young.state is RequestState.PENDING
    assert e.scheduler.get_stats().num_preemptions == 1
    e.commit({1: 6})
    while old.state is not RequestState.COMPLETED:
        e.step({1: 6, 2: 9})
    starts = [] if not young.state.is_final else [None]
    while not young.state.is_final:
        starts.extend(e.step({2: 9}).batch.starts)
    assert starts[0].token_ids == (5, 5, 7, 8)
    assert starts[0].num_prompt_tokens == 2
    assert (old.output_tokens, young.output_tokens) == ([6] * 5, [7, 8, 9])
    assert e.used_blocks == 0


def test_a_victim_with_a_step_in_flight_keeps_its_blocks_until_that_step_commits(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0)
    e.submit(1, prompt_len=2, max_tokens=5)
    young = e.submit(2, prompt_len=2, max_tokens=5)
    e.send()
    e.send()
    assert e.used_blocks == 6
    assert e.scheduler.schedule() is None  # request 1 waits for what request 2 gives back
    assert e.scheduler.get_stats().num_preemptions == 1
    assert young.state is not RequestState.PENDING
    e.commit({2: 7})
    assert e.used_blocks == 6
    e.commit({2: 8})
    assert e.used_blocks == 3
    assert young.state is RequestState.PENDING
    assert young.output_tokens == [7, 8]
    assert e.send().decode_request_ids == [1]


def test_only_as_many_are_preempted_as_blocks_are_missing(engine):
    e = engine(num_blocks=8, block_size=1, memory_threshold=1.0)
    for request_id in (1, 2, 3, 4):
        e.submit(request_id, prompt_len=1, max_tokens=5)
    e.step()
    e.send()
    assert e.used_blocks == 8
    assert e.scheduler.schedule() is None
    # 1 and 2 need a block each and wait for the two of 4; 3 waits its turn and keeps its own.
    assert e.scheduler.schedule() is None
    assert e.scheduler.get_stats().num_preemptions == 1
    e.commit()
    assert e.send().decode_request_ids == [1, 2]


def test_a_block_one_row_waits_for_is_not_counted_on_by_another(engine):
    e = engine(num_blocks=7, block_size=2, memory_threshold=1.0)
    for request_id, prompt_len, max_tokens in (
        (1, 3, 5),
        (2, 3, 5),
        (3, 1, 5),
        (4, 1, 5),
        (5, 1, 2),
    ):
        e.submit(request_id, prompt_len, max_tokens)
    e.send()
    e.send()
    assert e.used_blocks == 7
    # 1 and 2 need a block each. 5 ends with the steps in flight and returns one, which is 1's;
    # for 2's, one of the others must go, and one is enough.
    assert e.scheduler.schedule() is None
    assert e.scheduler.get_stats().num_preemptions == 1
    e.commit()
    e.commit()
    assert e.send().decode_request_ids == [1, 2]


def test_a_request_is_not_admitted_past_one_that_was_preempted(engine):
    e = engine(
        num_blocks=5, block_size=1, memory_threshold=1.0, max_batch_size=1, prefill_patience=1
    )
    e.submit(1, prompt_len=1, max_tokens=5)
    e.step()
    e.submit(2, prompt_len=1, max_tokens=5)
    e.step()
    e.step()
    assert [e.send().decode_request_ids for _ in range(2)] == [[1], [2]]
    assert e.scheduler.schedule() is None
    assert e.scheduler.get_stats().num_preemptions == 1  # of 2, which still drains
    e.commit()
    e.scheduler.cancel(1)
    e.submit(3, prompt_len=1, max_tokens=2)
    assert e.kv.get_memory_stats().free_blocks == 3
    assert e.scheduler.schedule() is None
    e.commit()
    assert e.send().prefill_request_ids == [2]


def test_cancelling_a_victim_that_drains_does_not_queue_it_again(engine):
    e = engine(num_blocks=6, block_size=1, memory_threshold=1.0)
    e.submit(1, prompt_len=2, max_tokens=5)
    young = e.submit(2, prompt_len=2, max_tokens=5)
    e.send()
    e.send()
    e.scheduler.schedule()
    assert e.scheduler.cancel(2) is not None
    e.commit()
    e.commit()
    assert young.state is RequestState.CANCELLED
    assert e.scheduler.get_stats().num_waiting == 0
    assert e.used_blocks == 3


def test_a_failed_row_fails_only_its_request(engine):
    e = engine()
    bad = e.submit(1, prompt_len=2)
    good = e.submit(2, prompt_len=2)
    e.send()
    e.send()
    events = e.commit({2: 6}, failures=(RowFailure(0, "logits are not finite"),))
    assert events == [
        RequestOutput(1, (), RequestState.FAILED, FinishReason.ERROR, "logits are not finite"),
        RequestOutput(2, (6,), RequestState.DECODE),
    ]
    assert e.commit(failures=(RowFailure(0, "slot 0 failed earlier"),)) == [
        RequestOutput(2, (5,), RequestState.DECODE)
    ]
    assert bad.error == "logits are not finite"
    assert good.output_tokens == [6, 5]
    assert e.used_blocks == 1
    assert len(e.send().batch.released) == 1


def test_a_refused_step_fails_its_requests_and_leaves_the_others(engine):
    e = engine(max_total_tokens=2)
    first = e.submit(1, prompt_len=2, max_tokens=9)
    e.step()
    second = e.submit(2, prompt_len=1, max_tokens=9)
    e.scheduler.cancel(1)
    e.send()
    events = e.commit(refusal="new_block_ids[0]: 99 is not below 64")
    assert [(x.request_id, x.state, x.error) for x in events] == [
        (2, RequestState.FAILED, "new_block_ids[0]: 99 is not below 64")
    ]
    assert first.state is RequestState.CANCELLED
    assert second.finish_reason is FinishReason.ERROR
    assert e.used_blocks == 0
    assert e.scheduler.get_stats().num_running == 0


def test_a_refused_step_ends_the_epoch_and_who_was_not_in_it_goes_on(engine):
    e = engine(max_batch_size=1)
    bad, other = (e.submit(i, prompt_len=2, max_tokens=9) for i in (1, 2))
    e.step({1: 6})
    e.send()
    e.send()  # made as if the one before had run
    events = e.commit(refusal="no")
    assert [(event.request_id, event.state) for event in events] == [(1, RequestState.FAILED)]
    assert bad.output_tokens == [6]
    assert e.used_blocks == 0
    assert e.scheduler.get_stats().num_in_flight == 0
    e.in_flight.clear()
    e.scheduler.lose_epoch(last_step=7)
    output = e.step()
    assert output.batch.step_id == 8
    assert output.prefill_request_ids == [other.id]
    assert len(other.output_tokens) == 1


def test_after_a_lost_epoch_everything_starts_again_from_what_was_committed(engine):
    e = engine()
    requests = [e.submit(i, prompt_len=2) for i in (1, 2)]
    waiting = e.submit(3, prompt_len=2)
    e.step({1: 6, 2: 7, 3: 8})
    e.send()
    e.in_flight.clear()
    e.scheduler.lose_epoch(last_step=10)
    assert e.used_blocks == 0
    assert all(r.state is RequestState.PENDING for r in [*requests, waiting])
    output = e.send()
    assert output.batch.step_id == 11
    assert output.batch.released == ()
    assert output.prefill_request_ids == [1, 2, 3]
    assert [s.token_ids for s in output.batch.starts] == [(5, 5, 6), (5, 5, 7), (5, 5, 8)]


def test_a_request_that_had_ended_is_not_revived_by_a_lost_epoch(engine):
    e = engine()
    request = e.submit(1, prompt_len=2)
    e.send()
    e.send()
    e.commit({1: 0})
    e.in_flight.clear()
    e.scheduler.lose_epoch()
    assert request.state is RequestState.COMPLETED
    assert not e.scheduler.has_pending_work()
    assert e.used_blocks == 0


def test_a_result_that_does_not_fit_the_step_is_refused_and_changes_nothing(engine):
    e = engine()
    with pytest.raises(SchedulerError, match="no step is in flight"):
        e.scheduler.commit(StepResult(1, []))
    request = e.submit(1, prompt_len=2)
    e.send()
    with pytest.raises(SchedulerError, match="step 1 is the next to commit"):
        e.scheduler.commit(StepResult(2, [5]))
    with pytest.raises(SchedulerError, match="has 1 samples, its result 2"):
        e.scheduler.commit(StepResult(1, [5, 5]))
    with pytest.raises(SchedulerError, match="has 1 samples, its result 0"):
        e.scheduler.commit(StepResult(1, []))
    for row in (3, 1, -1):
        with pytest.raises(SchedulerError, match=f"its result names row {row}"):
            e.scheduler.commit(StepResult(1, [5], row_failures=(RowFailure(row, "?"),)))
    assert request.output_tokens == []
    e.commit()
    assert request.output_tokens == [5]


def test_results_are_also_taken_in_by_the_seed_documents_name(engine):
    e = engine()
    e.submit(1, prompt_len=2)
    output = e.send()
    assert len(e.scheduler.update_sequences(StepResult(output.batch.step_id, [5]))) == 1
