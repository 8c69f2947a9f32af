"""Drafts change how many tokens a step brings, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute_plane.errors import BatchRefused, InvalidBatch
from compute_plane.executor.step import PromptLogprobsRequest, SamplingKey, StepBatch, StepResult
from tests.compute_plane.executor.slot_batches import GREEDY, LIMITS, Plane, alone, start, step

PROMPTS = (b"abc", b"hello", b"x")
KEYS = (
    GREEDY,
    SamplingKey(0.7, 0.9, 5, 0, num_logprobs=2),
    SamplingKey(1.0, 1.0, 8, 1, repetition_penalty=1.5, num_logprobs=0),
)
BLOCKS_A_SLOT = 9
LENGTH = 30


def drafted(batch: StepBatch, drafts: Sequence[Sequence[int]]) -> StepBatch:
    """The batch with drafts for each of its rows of one token."""
    counts = np.array([len(ids) for ids in drafts], dtype=np.int64)
    return replace(
        batch,
        query_lens=batch.query_lens + counts,
        draft_counts=counts,
        draft_ids=np.array([token for ids in drafts for token in ids], dtype=np.int64),
    )


def started() -> tuple[Plane, list[int]]:
    """A plane on which each of the prompts was computed, and the first token of each."""
    plane = Plane()
    tables = [range(BLOCKS_A_SLOT * slot, BLOCKS_A_SLOT * (slot + 1)) for slot in range(3)]
    starts = [
        start(slot, prompt, tables[slot][:7], key)
        for slot, (prompt, key) in enumerate(zip(PROMPTS, KEYS, strict=True))
    ]
    rows = [(slot, 0, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
    return plane, plane.tokens(step(rows, starts=starts))


def logprobs_of(result: StepResult, sample: int) -> list[Any]:
    """What is told of the kept drafts of a sample and of its token."""
    entries = [*result.draft_logprobs, *result.sample_logprobs]
    return [
        (entry.logprob, entry.top.token_ids.tolist(), entry.top.logprobs.tolist())
        for entry in entries
        if entry.sample == sample
    ]


def one_by_one() -> tuple[list[list[int]], list[list[Any]]]:
    """What each prompt gives without drafts, but for the first token's log-probabilities."""
    plane, first = started()
    texts = [[token] for token in first]
    logprobs: list[list[Any]] = [[], [], []]
    for _ in range(LENGTH - 8):
        rows = [(slot, len(PROMPTS[slot]) + len(texts[slot]) - 1, 1) for slot in range(3)]
        result = plane.run(step(rows))
        for slot, token in enumerate(result.sampled_token_ids.tolist()):
            texts[slot].append(token)
            logprobs[slot] += logprobs_of(result, slot)
    return texts, logprobs


WANTED_TEXTS, WANTED_LOGPROBS = one_by_one()


@pytest.mark.wide
@given(data=st.data())
def test_texts_and_logprobs_are_those_of_one_token_a_step(data: st.DataObject) -> None:
    plane, first = started()
    texts = [[token] for token in first]
    logprobs: list[list[Any]] = [[], [], []]
    for _ in range(6):
        slots = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
        drafts = []
        for slot in slots:
            right = WANTED_TEXTS[slot][len(texts[slot]) :]
            num_right = data.draw(st.integers(0, min(2, len(right) - 1)))
            wrong = data.draw(st.lists(st.integers(0, 255), max_size=min(1, len(right) - 1)))
            drafts.append([*right[:num_right], *wrong])
        while sum(map(len, drafts)) + len(drafts) > LIMITS.max_rows:
            drafts[drafts.index(max(drafts, key=len))].pop()
        rows = [(slot, len(PROMPTS[slot]) + len(texts[slot]) - 1, 1) for slot in slots]
        batch = step(rows)
        result = plane.run(drafted(batch, drafts) if any(drafts) else batch)
        kept = result.kept_drafts.tolist() or [0] * len(slots)
        for k, (slot, token) in enumerate(
            zip(slots, result.sampled_token_ids.tolist(), strict=True)
        ):
            assert kept[k] == right_ones(drafts[k], WANTED_TEXTS[slot][len(texts[slot]) :])
            texts[slot] += [*drafts[k][: kept[k]], token]
            logprobs[slot] += logprobs_of(result, k)
    for slot in range(3):
        assert texts[slot] == WANTED_TEXTS[slot][: len(texts[slot])]
        assert logprobs[slot] == WANTED_LOGPROBS[slot][: len(logprobs[slot])]
        has_logprobs = KEYS[slot].num_logprobs is not None
        assert len(logprobs[slot]) == (len(texts[slot]) - 1) * has_logprobs


def right_ones(drafts: Sequence[int], wanted: Sequence[int]) -> int:
    """How many drafts are right, up to the first that is not."""
    wrong = [index for index, token in enumerate(drafts) if token != wanted[index]]
    return wrong[0] if wrong else len(drafts)


def test_rows_with_drafts_go_beside_others_and_are_numbered_as_sent() -> None:
    plane, first = started()
    wanted = [alone(prompt, 5, key) for prompt, key in zip(PROMPTS, KEYS, strict=True)]
    batch = step([(1, 5, 1), (0, 3, 1), (2, 1, 1)], prompt_logprobs=[1], sampled=[2, 0, 1])
    result = plane.run(drafted(batch, [wanted[1][1:3], [], [wanted[2][1], 7]]))
    assert first == [text[0] for text in wanted]
    assert result.kept_drafts.tolist() == [1, 2, 0]
    assert result.sampled_token_ids.tolist() == [wanted[2][2], wanted[1][3], wanted[0][1]]
    assert [entry.sample for entry in result.draft_logprobs] == [0, 1, 1]
    assert [entry.sample for entry in result.sample_logprobs] == [0, 1]
    assert [(entry.row, entry.first_position) for entry in result.prompt_logprobs] == [(1, 4)]
    ran = plane.batches[-1]
    assert ran.query_lens.tolist() == [1] * 7
    assert ran.positions.tolist() == [5, 6, 7, 3, 1, 2, 3]
    assert ran.prompt_logprob_rows == [3]


def test_a_prompt_is_computed_whole_beside_drafts() -> None:
    plane = Plane()
    plane.run(step([(0, 0, 3)], starts=[start(0, PROMPTS[0], range(3))]))
    wanted = alone(PROMPTS[0], 4)
    batch = step([(0, 3, 1), (1, 0, 5)], starts=[start(1, PROMPTS[1], range(3, 6))])
    result = plane.run(drafted(batch, [wanted[1:3], []]))
    assert result.kept_drafts.tolist() == [2, 0]
    assert result.sampled_token_ids.tolist() == [wanted[3], *alone(PROMPTS[1], 1)]


def test_a_row_that_fails_fails_without_its_drafts_and_one_behind_it_ends_what_is_kept() -> None:
    plane, _ = started()
    wanted = [alone(prompt, 6, key) for prompt, key in zip(PROMPTS, KEYS, strict=True)]
    batch = step([(0, 3, 1), (1, 5, 1)])
    # As run: rows 0 to 2 of slot 0, 3 to 5 of slot 1.
    result = plane.run(
        drafted(batch, [wanted[0][1:3], wanted[1][1:3]]), failed_rows={0: "here", 5: "behind"}
    )
    assert [(failure.row, failure.message) for failure in result.row_failures] == [(0, "here")]
    assert result.kept_drafts.tolist() == [0, 1]
    assert result.sampled_token_ids.tolist()[1] == wanted[1][2]
    again = plane.run(drafted(step([(0, 4, 1), (1, 7, 1)]), [[1, 1], wanted[1][3:4]]))
    assert [(failure.row, failure.reason.value) for failure in again.row_failures] == [
        (0, "poisoned")
    ]
    assert again.kept_drafts.tolist() == [0, 1]
    assert again.sampled_token_ids.tolist()[1] == wanted[1][4]
    assert [entry.sample for entry in again.draft_logprobs] == [1]


def test_a_row_that_fails_behind_the_drafts_of_another_poisons_its_own_slot() -> None:
    plane, _ = started()
    wanted = alone(PROMPTS[0], 4)
    batch = drafted(step([(0, 3, 1), (1, 5, 1)]), [wanted[1:3], []])
    assert [f.row for f in plane.run(batch, failed_rows={3: "here"}).row_failures] == [1]
    again = plane.run(step([(0, 6, 1), (1, 6, 1)]))
    assert [failure.row for failure in again.row_failures] == [1]


def test_drafts_that_their_row_does_not_count_are_refused_of_a_run_of_steps_too() -> None:
    plane, _ = started()
    plane.run(step([(0, 3, 1)]))
    plane.run(step([(0, 4, 1)]))
    batch = replace(drafted(step([(0, 5, 1)]), [[1]]), query_lens=np.array([1]))
    with pytest.raises(InvalidBatch, match="draft_counts"):
        plane.slots.prepare(batch)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"query_lens": [4]}, "draft_counts[0]"),
        ({"draft_counts": [3]}, "draft_ids"),
        ({"draft_counts": [1, 1]}, "draft_counts"),
        ({"draft_ids": [1, 259]}, "draft_ids[1]"),
        ({"sampled_rows": []}, "draft_counts[0]"),
        ({"positions": [2]}, "positions[0]"),
        ({"sampled_slots": [1]}, "sampled_slots[0]"),
        ({"draft_counts": [8], "draft_ids": [1] * 8, "query_lens": [9]}, "draft_ids"),
    ],
)
def test_drafts_that_do_not_fit_are_refused_and_leave_no_trace(
    change: dict[str, list[int]], field: str
) -> None:
    plane, _ = started()
    wanted = alone(PROMPTS[0], 4)
    batch = drafted(step([(0, 3, 1)]), [wanted[1:3]])
    columns = {name: np.array(values, dtype=np.int64) for name, values in change.items()}
    with pytest.raises(InvalidBatch) as refused:
        plane.slots.prepare(replace(batch, **columns))  # type: ignore[arg-type]
    assert refused.value.field == field
    result = plane.run(batch)
    assert (result.kept_drafts.tolist(), result.sampled_token_ids.tolist()) == ([2], [wanted[3]])


def test_drafts_are_no_prompt() -> None:
    plane, _ = started()
    batch = drafted(step([(0, 3, 1)]), [[1]])
    with pytest.raises(InvalidBatch, match="no prompt"):
        plane.slots.prepare(replace(batch, prompt_logprobs=[PromptLogprobsRequest(0, 0)]))


def test_a_longest_sequence_has_no_place_for_drafts() -> None:
    limits = replace(LIMITS, context_length=6)
    plane = Plane(limits)
    plane.run(step([(0, 0, 4)], starts=[start(0, b"abcd", [0, 1])]))
    with pytest.raises(BatchRefused, match="longest sequence"):
        plane.slots.prepare(drafted(step([(0, 4, 1)]), [[1, 2]]))
