"""A batch that wants drafts has them in its answer, whichever way steps are run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from compute_plane.errors import BatchRefused, DeviceLostError, InvalidBatch, UnsupportedBatch
from compute_plane.executor.batch_checks import features_of
from compute_plane.executor.draft_model import KnownText
from compute_plane.executor.next_drafts import with_next_drafts
from compute_plane.executor.step import SamplingKey, StepBatch, StepResult
from tests.compute_plane.executor.driven_device import TEXT, Driven, decode, prompts
from tests.compute_plane.executor.pipelined_executors import TIMEOUT_S
from tests.compute_plane.executor.slot_batches import GREEDY, LIMITS, Plane, alone, start, step

WITH_A_MODEL = replace(LIMITS, has_draft_model=True)


class Oracle:
    """Guesses what will be said, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[KnownText] = []
        self.fault: Exception | None = None

    def guess(self, texts: Sequence[KnownText]) -> list[list[int]]:
        if self.fault is not None:
            raise self.fault
        self.asked += [text._replace(tokens=text.tokens.copy()) for text in texts]
        return [alone(bytes(text.tokens.tolist()), text.most) for text in texts]


def wanting(batch: StepBatch, *counts: int) -> StepBatch:
    return replace(batch, wanted_drafts=np.array(counts, dtype=np.int64))


def next_drafts(result: StepResult | None) -> list[list[int]]:
    assert result is not None
    ids = iter(result.next_draft_ids.tolist())
    return [[next(ids) for _ in range(count)] for count in result.next_draft_counts.tolist()]


def two_prompts() -> StepBatch:
    starts = [start(0, b"abc", [0, 1]), start(1, b"hello", [2, 3], SamplingKey(0.7, 0.9, 5, 0))]
    return step([(0, 0, 3), (1, 0, 5)], starts=starts)


def test_each_row_has_as_many_as_it_wants_behind_its_sample() -> None:
    plane, oracle = Plane(WITH_A_MODEL), Oracle()
    batch = wanting(two_prompts(), 0, 2)
    result = plane.run(batch)
    [_, second] = result.sampled_token_ids.tolist()
    result = with_next_drafts(result, batch, plane.slots, oracle)
    assert next_drafts(result) == [[], alone(b"hello" + bytes([second]), 2)]
    [text] = oracle.asked
    assert (text.slot, text.is_greedy, text.most) == (1, False, 2)
    assert text.table.tolist() == [2, 3]


def test_a_row_with_drafts_is_guessed_on_behind_those_that_were_right() -> None:
    plane, oracle = Plane(WITH_A_MODEL), Oracle()
    [first] = plane.tokens(step([(0, 0, 3)], starts=[start(0, b"abc", [0, 1])]))
    said = alone(b"abc", 4)
    assert first == said[0]
    batch = wanting(
        replace(
            step([(0, 3, 3)]), draft_counts=np.array([2]), draft_ids=np.array([said[1], 7])
        ), 3
    )  # fmt: skip
    result = with_next_drafts(plane.run(batch), batch, plane.slots, oracle)
    assert result.kept_drafts.tolist() == [1]
    assert oracle.asked[0].tokens.tolist() == [*b"abc", *said[:3]]
    assert next_drafts(result) == [alone(b"abc" + bytes(said[:3]), 3)]


def test_rows_that_failed_have_none_and_the_others_have() -> None:
    plane, oracle = Plane(WITH_A_MODEL), Oracle()
    batch = wanting(two_prompts(), 2, 2)
    result = with_next_drafts(plane.run(batch, {0: "not finite"}), batch, plane.slots, oracle)
    assert [len(drafts) for drafts in next_drafts(result)] == [0, 2]
    again = wanting(step([(0, 3, 1), (1, 5, 1)]), 2, 2)
    result = with_next_drafts(plane.run(again), again, plane.slots, oracle)
    assert [len(drafts) for drafts in next_drafts(result)] == [0, 2]
    assert {text.slot for text in oracle.asked} == {1}


def test_a_batch_that_wants_none_asks_nobody() -> None:
    plane, oracle = Plane(WITH_A_MODEL), Oracle()
    for batch in (two_prompts(), wanting(step([(0, 3, 1), (1, 5, 1)]), 0, 0)):
        result = with_next_drafts(plane.run(batch), batch, plane.slots, oracle)
        assert next_drafts(result) == []
    assert oracle.asked == []


def test_samples_are_answered_though_nobody_can_guess() -> None:
    plane, oracle = Plane(WITH_A_MODEL), Oracle()
    oracle.fault = ValueError("never thought of")
    batch = wanting(two_prompts(), 2, 2)
    result = plane.run(batch)
    assert with_next_drafts(result, batch, plane.slots, oracle) is result


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1), (0,)])
def test_a_step_that_goes_on_is_looked_at_as_any_other(counts: tuple[int, ...]) -> None:
    for limits, is_right in ((LIMITS, False), (WITH_A_MODEL, len(counts) == 2)):
        plane = Plane(limits)
        plane.tokens(two_prompts())
        plane.tokens(step([(0, 3, 1), (1, 5, 1)], new_blocks=[[], []]))
        batch = wanting(step([(0, 4, 1), (1, 6, 1)]), *counts)
        if is_right:
            plane.tokens(batch)
        else:
            assert refusal_of(batch, plane).field == "wanted_drafts"


def refusal_of(batch: StepBatch, plane: Plane) -> BatchRefused:
    with pytest.raises(BatchRefused) as caught:
        plane.run(batch)
    return caught.value


def test_a_plane_without_a_draft_model_refuses_to_guess() -> None:
    refusal = refusal_of(wanting(two_prompts(), 1, 1), Plane())
    assert isinstance(refusal, UnsupportedBatch)
    assert refusal.field == "wanted_drafts"
    assert "draft_model" not in features_of(LIMITS)
    assert "draft_model" in features_of(WITH_A_MODEL)


@pytest.mark.parametrize(
    ("batch", "field", "message"),
    [
        (wanting(two_prompts(), 1), "wanted_drafts", "2 rows, it has 1"),
        (
            wanting(replace(two_prompts(), sampled_rows=np.array([0])), 0, 1),
            "wanted_drafts[1]",
            "one sample",
        ),
        (
            wanting(replace(two_prompts(), sampled_slots=np.array([1, 0])), 1, 0),
            "wanted_drafts[0]",
            "own slot",
        ),
        (
            wanting(
                replace(
                    two_prompts(),
                    sampled_rows=np.array([0, 0, 1]),
                    sampled_slots=np.array([0, 2, 1]),
                    starts=[*two_prompts().starts, start(2, b"abc", [0, 1], GREEDY)],
                ),
                1,
                0,
            ),
            "wanted_drafts[0]",
            "one sample",
        ),
    ],
    ids=["a row too few", "not sampled", "for another slot", "two samples"],
)
def test_wishes_that_cannot_be_met_are_refused_and_leave_no_trace(
    batch: StepBatch, field: str, message: str
) -> None:
    plane = Plane(WITH_A_MODEL)
    refusal = refusal_of(batch, plane)
    assert isinstance(refusal, InvalidBatch)
    assert refusal.field == field
    assert message in refusal.message
    assert plane.tokens(two_prompts())[0] == alone(b"abc", 1)[0]


@pytest.fixture
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def driven(oracle: Oracle) -> Iterator[Driven]:
    driven = Driven(oracle)
    yield driven
    driven.executor.is_driven_by_hand = False
    driven.device.stop(TIMEOUT_S)


def test_on_a_device_that_is_given_steps_ahead_the_answer_has_them_too(driven: Driven) -> None:
    said = alone(TEXT, 5)
    driven.send(wanting(prompts(0), 2))
    driven.launched().run()
    assert next_drafts(driven.reply().result) == [said[1:3]]


def test_nothing_is_launched_beside_a_step_that_wants_drafts(driven: Driven) -> None:
    said = alone(TEXT, 5)
    driven.send(prompts(0))
    driven.send(wanting(decode(4, 0), 3))
    first = driven.launched()
    assert len(driven.executor.steps) == 1  # its newest token is not known
    first.run()
    second = driven.launched()
    driven.send(decode(5, 0))
    assert second.batch.input_sources is None
    assert len(driven.executor.steps) == 2
    second.run()
    third = driven.launched()
    assert third.batch.input_sources is None
    third.run()
    assert driven.tokens() == said[:1]
    result = driven.reply().result
    assert result is not None
    assert result.sampled_token_ids.tolist() == said[1:2]
    assert next_drafts(result) == [said[2:5]]
    assert driven.tokens() == said[2:3]


def test_a_device_that_is_lost_while_drafts_are_guessed_ends_the_plane(
    driven: Driven, oracle: Oracle
) -> None:
    oracle.fault = DeviceLostError("an illegal address")
    driven.send(wanting(prompts(0), 2))
    driven.launched().run()
    assert driven.broken.wait(TIMEOUT_S)
