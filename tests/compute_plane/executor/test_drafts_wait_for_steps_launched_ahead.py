"""On a device that is given steps ahead a step with drafts goes by itself, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.errors import BatchFailed, DeviceLostError, PlaneBroken
from compute_plane.executor.step import StepBatch
from tests.compute_plane.executor.driven_device import TEXT, Driven, decode, prompts
from tests.compute_plane.executor.pipelined_executors import TIMEOUT_S
from tests.compute_plane.executor.slot_batches import alone, step


def drafted(position: int, slot: int, drafts: list[int]) -> StepBatch:
    """A row of a known token and guesses of what follows it."""
    batch = step([(slot, position, 1 + len(drafts))])
    columns = {"draft_counts": [len(drafts)], "draft_ids": drafts}
    return replace(batch, **{name: np.array(c, np.int64) for name, c in columns.items()})


def test_a_step_with_drafts_is_launched_when_the_one_before_it_is_over(driven: Driven):
    wanted = alone(TEXT, 6)
    driven.send(prompts(0))
    driven.send(drafted(4, 0, [*wanted[1:3], 7]))
    first = driven.launched()
    first.run()
    assert driven.tokens() == wanted[:1]
    second = driven.launched()  # it needs to know nothing of it that is not known
    assert second.batch.input_sources is None
    assert second.batch.input_tokens.tolist() == [*wanted[:3], 7]
    second.run()
    result = driven.reply().result
    assert result is not None
    assert result.kept_drafts.tolist() == [2]
    assert result.sampled_token_ids.tolist() == wanted[3:4]


def test_nothing_is_launched_beside_a_step_with_drafts(driven: Driven):
    wanted = alone(TEXT, 5)
    driven.begin(0)
    driven.send(drafted(4, 0, wanted[1:3]))
    step_with_drafts = driven.launched()
    driven.send(decode(7, 0))
    assert len(driven.executor.steps) == 2  # the prompt's and that one
    step_with_drafts.run()
    after = driven.launched()
    assert after.batch.input_sources is None
    assert after.batch.input_tokens.tolist() == wanted[3:4]
    after.run()
    assert driven.reply().result.sampled_token_ids.tolist() == wanted[3:4]  # type: ignore[union-attr]
    assert driven.tokens() == wanted[4:]


def test_steps_are_launched_ahead_again_behind_one_with_drafts(driven: Driven):
    wanted = alone(TEXT, 6)
    driven.begin(0)
    driven.send(drafted(4, 0, wanted[1:2]))
    driven.launched().run()
    driven.reply()
    driven.send(decode(6, 0))
    driven.send(decode(7, 0))
    first, second = driven.launched(), driven.launched()
    assert not first.is_over
    assert second.batch.input_sources is not None
    first.run()
    second.run()
    assert [driven.tokens() for _ in range(2)] == [wanted[3:4], wanted[4:5]]


def test_a_step_with_drafts_that_fails_takes_its_slots_along_and_no_others(driven: Driven):
    driven.begin(0, 1)
    driven.send(drafted(4, 0, [1, 2]))
    failing = driven.launched()
    failing.failure = RuntimeError("the device did not like it")
    failing.run()
    refusal = driven.reply().refusal
    assert isinstance(refusal, BatchFailed)
    assert "did not like it" in refusal.message
    driven.send(decode(4, 0))
    driven.send(decode(4, 1))
    poisoned = driven.reply().result
    assert poisoned is not None
    assert [failure.row for failure in poisoned.row_failures] == [0]
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 2)[1:]


def test_drafts_that_are_refused_leave_the_step_under_way_alone(driven: Driven):
    driven.send(prompts(0))
    driven.send(drafted(4, 0, [1 << 40]))
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 1)
    refusal = driven.reply().refusal
    assert refusal is not None
    assert refusal.field == "draft_ids[0]"


@pytest.mark.parametrize("is_right", [True, False])
def test_a_row_without_drafts_beside_one_with_them_goes_on(driven: Driven, is_right: bool):
    wanted = alone(TEXT, 4)
    driven.begin(0, 1)
    guess = wanted[1] if is_right else wanted[1] ^ 1
    batch = step([(0, 4, 1), (1, 4, 2)])
    batch = replace(
        batch, draft_counts=np.array([0, 1]), draft_ids=np.array([guess], dtype=np.int64)
    )
    driven.send(batch)
    driven.launched().run()
    assert driven.tokens() == [wanted[1], wanted[2] if is_right else wanted[1]]
    driven.send(step([(0, 5, 1), (1, 5 + is_right, 1)]))
    driven.launched().run()
    assert driven.tokens() == [wanted[2], wanted[3] if is_right else wanted[2]]


def test_a_device_that_is_lost_in_a_step_with_drafts_is_its_only_answer(driven: Driven):
    driven.begin(0)
    driven.send(drafted(4, 0, [1]))
    lost = driven.launched()
    driven.send(decode(5, 0))
    lost.failure = DeviceLostError("an illegal address")
    lost.run()
    assert driven.broken.wait(TIMEOUT_S)
    assert [type(driven.answers.get(timeout=TIMEOUT_S)) for _ in range(2)] == [PlaneBroken] * 2
    assert driven.answers.empty()
