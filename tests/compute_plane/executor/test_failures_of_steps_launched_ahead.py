"""What fails ends what stands on it, and nothing else, also in the step launched meanwhile."""

from __future__ import annotations

import pytest

from compute_plane.errors import (
    BatchFailed,
    InvalidBatch,
)
from compute_plane.executor.step import (
    RowFailureReason,
    StepBatch,
    TableCopy,
)
from tests.compute_plane.executor.driven_device import PENALISED, TEXT, Driven, decode, prompts
from tests.compute_plane.executor.slot_batches import LIMITS, alone, start, step


def test_a_row_that_fails_fails_its_row_of_the_step_already_launched(driven: Driven):
    driven.begin(0, 1, 2)
    driven.send(decode(4, 0, 1, 2))
    driven.send(decode(5, 2, 1, 0))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {1: "not finite"}
    first.run()
    second.failed_rows = {1: "not finite either"}
    second.run()
    replies = [driven.reply().result, driven.reply().result]
    seen = [
        [(failure.row, failure.reason) for failure in reply.row_failures]
        for reply in replies
        if reply is not None
    ]
    assert seen == [[(1, RowFailureReason.NOT_FINITE)], [(1, RowFailureReason.POISONED)]]
    assert replies[1] is not None
    assert replies[1].sampled_token_ids[[0, 2]].tolist() == [alone(TEXT, 3)[-1]] * 2
    driven.send(decode(6, 0, 1, 2))
    last = driven.launched()
    assert last.batch.seq_lens.tolist() == [7, 7]
    last.run()
    assert [failure.row for failure in driven.reply().result.row_failures] == [1]  # type: ignore[union-attr]


def test_a_row_that_failed_is_not_taken_along_by_the_run_it_was_in(driven: Driven):
    driven.begin(0, 1)
    for position in (4, 5):
        driven.send(decode(position, 0, 1))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {1: "not finite"}
    first.run()
    driven.reply()
    driven.send(decode(6, 0, 1))
    third = driven.launched()
    second.run()
    third.run()
    for _ in range(2):
        result = driven.reply().result
        assert result is not None
        assert [(failure.row, failure.reason) for failure in result.row_failures] == [
            (1, RowFailureReason.POISONED)
        ]
    assert third.batch.seq_lens.tolist() == [7]


def test_samples_for_a_slot_that_failed_need_no_room_in_it(driven: Driven):
    driven.begin(0)
    longest = LIMITS.context_length
    driven.send(step([(1, 0, longest)], starts=[start(1, b"a" * longest, range(8, 18))]))
    full = driven.launched()
    full.failed_rows = {0: "not finite"}
    full.run()
    driven.reply()
    for position, tokens in ((4, []), (5, [65]), (6, [65])):
        batch = step([(0, position, 1)], tokens=[tokens], sampled=[0], sampled_slots=[1])
        driven.send(batch)
        driven.launched().run()
        assert driven.reply().result is not None


def test_the_next_part_of_a_prompt_that_failed_has_no_log_probabilities(driven: Driven):
    first_part = step(
        [(0, 0, 4)], starts=[start(0, b"prompted", range(8))], sampled=[], prompt_logprobs=[0]
    )
    driven.send(first_part)
    driven.send(step([(0, 4, 4)], sampled=[], prompt_logprobs=[0]))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {0: "not finite"}
    first.run()
    second.run()
    driven.reply()
    result = driven.reply().result
    assert result is not None
    assert [failure.reason for failure in result.row_failures] == [RowFailureReason.POISONED]
    assert not result.prompt_logprobs


def test_a_slot_started_again_outlives_the_late_failure_of_its_former_life(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0, 1))
    again = start(1, b"again", range(16, 24))
    driven.send(step([(0, 5, 1), (1, 0, 5)], starts=[again]))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {1: "not finite"}
    first.run()
    second.run()
    assert [failure.row for failure in driven.reply().result.row_failures] == [1]  # type: ignore[union-attr]
    assert driven.tokens() == [alone(TEXT, 3)[-1], *alone(b"again", 1)]


def test_a_step_that_fails_as_a_whole_takes_its_slots_of_the_next_step_along(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0))
    driven.send(step([(0, 5, 1), (1, 4, 1)]))
    first, second = driven.launched(), driven.launched()
    first.failure = RuntimeError("the device is ill")
    first.run()
    second.run()
    refusal = driven.reply()
    assert isinstance(refusal.refusal, BatchFailed)
    assert (refusal.header.step_id, refusal.expected_step) == (2, 3)
    result = driven.reply().result
    assert result is not None
    assert [(failure.row, failure.reason) for failure in result.row_failures] == [
        (0, RowFailureReason.POISONED)
    ]
    assert result.sampled_token_ids[1] == alone(TEXT, 2)[-1]


def test_a_slot_in_the_memory_of_a_released_one_outlives_the_failure_of_its_release(
    driven: Driven,
):
    """The failing step copies a block of the slot that it releases."""
    driven.begin(0, 1)
    copies = [TableCopy(0, 1, 1, 40)]
    driven.send(step([(1, 4, 1)], copies=copies, released=[0]))
    driven.send(prompts(2))
    first, second = driven.launched(), driven.launched()
    first.failure = RuntimeError("the device is ill")
    first.run()
    second.run()
    assert isinstance(driven.reply().refusal, BatchFailed)
    assert driven.tokens() == alone(TEXT, 1)


def test_a_sample_for_another_slot_waits_for_the_token_its_row_computes(driven: Driven):
    """The history of the other slot ends with a token of its own, whatever the row's is."""
    starts = [start(0, TEXT, range(8)), start(1, b"text!", range(8), PENALISED)]
    driven.send(step([(0, 0, 4)], starts=starts))
    first = driven.launched()
    driven.send(step([(0, 4, 1)], sampled=[0], sampled_slots=[1]))
    first.run()
    driven.tokens()
    second = driven.launched()
    assert second.batch.input_sources is None
    (row,) = second.batch.sampling
    assert row.penalties is not None
    assert row.penalties.history.tolist() == list(b"text!")
    second.run()


def refused_batches() -> dict[str, StepBatch]:
    return {
        "positions[0]": decode(9, 0),
        "slots[1]": step([(0, 4, 1), (5, 0, 1)]),
        "copies[0].source_block": step([(0, 4, 1)], copies=[TableCopy(0, 0, 7, 9)]),
    }


@pytest.mark.parametrize("field", refused_batches())
def test_a_refusal_is_answered_after_the_step_under_way(driven: Driven, field: str):
    driven.send(prompts(0))
    driven.send(refused_batches()[field])
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 1)
    reply = driven.reply()
    assert isinstance(reply.refusal, InvalidBatch)
    assert (reply.refusal.field, reply.expected_step) == (field, 3)
    driven.send(decode(4, 0))
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 2)[1:]


def test_a_launch_that_fails_is_answered_after_the_step_under_way(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0, 1))
    first = driven.launched()
    driven.executor.launch_failure = RuntimeError("no more memory")
    driven.send(decode(5, 0))
    first.run()
    assert driven.tokens() == alone(TEXT, 2)[1:] * 2
    assert isinstance(driven.reply().refusal, BatchFailed)
    driven.send(decode(5, 0, 1))
    driven.launched().run()
    result = driven.reply().result
    assert result is not None
    assert [failure.row for failure in result.row_failures] == [0]
    assert result.sampled_token_ids[1] == alone(TEXT, 3)[-1]


def test_a_batch_without_rows_is_answered_after_the_step_under_way(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0))
    driven.send(step(released=[1]))
    driven.launched().run()
    assert [driven.reply().header.step_id for _ in range(2)] == [2, 3]
