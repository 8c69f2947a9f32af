"""Constraints decide what their rows sample, and nothing of any other row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.errors import InvalidBatch
from compute_plane.executor.batch_checks import SlotLimits, features_of
from compute_plane.executor.constraints import check_constraints
from compute_plane.executor.simulated import ALPHABET, VOCAB_SIZE
from compute_plane.executor.step import RowConstraint, SamplingKey, StepBatch
from tests.compute_plane.executor.slot_batches import GREEDY, LIMITS, Plane, alone, start, step

PROMPTS = (b"abc", b"hello", b"x")


def mask(allowed: Sequence[int]) -> np.ndarray:
    return np.packbits(np.isin(np.arange(VOCAB_SIZE), allowed), bitorder="little")


def constrained(batch: StepBatch, allowed: dict[int, Sequence[int]]) -> StepBatch:
    return replace(
        batch, constraints=[RowConstraint(row, mask(tokens)) for row, tokens in allowed.items()]
    )


def first_step(key: SamplingKey = GREEDY) -> StepBatch:
    starts = [
        start(slot, prompt, range(9 * slot, 9 * slot + 7), key)
        for slot, prompt in enumerate(PROMPTS)
    ]
    return step([(slot, 0, len(p)) for slot, p in enumerate(PROMPTS)], starts=starts)


@pytest.mark.wide
@settings(max_examples=30)
@given(data=st.data())
def test_rows_beside_constrained_ones_say_what_they_say_alone(data: st.DataObject) -> None:
    plane = Plane()
    wanted = [alone(prompt, 9) for prompt in PROMPTS]
    texts: list[list[int]] = [[], [], []]
    is_free = [True, True, True]
    for number in range(9):
        rows = data.draw(st.permutations(range(3))) if number else range(3)
        batch = first_step()
        if number:
            batch = step([(s, len(PROMPTS[s]) + len(texts[s]) - 1, 1) for s in rows])
        allowed = data.draw(
            st.dictionaries(
                st.integers(0, 2), st.lists(st.sampled_from(ALPHABET), min_size=1), max_size=2
            )
        )
        tokens = plane.tokens(constrained(batch, allowed))
        for row, slot in enumerate(rows):
            texts[slot].append(tokens[row])
            if row in allowed:
                assert tokens[row] in allowed[row]
                is_free[slot] &= tokens[row] == wanted[slot][number]
            elif is_free[slot]:
                assert tokens[row] == wanted[slot][number]


def test_a_constraint_is_forgotten_with_its_step() -> None:
    plane = Plane()
    free = Plane().tokens(first_step())
    forced = [ALPHABET[5], ALPHABET[7], ALPHABET[9]]
    assert plane.tokens(constrained(first_step(), {i: [t] for i, t in enumerate(forced)})) == forced
    plane = Plane()
    assert plane.tokens(constrained(first_step(), {1: [free[1]]})) == free
    for number in range(1, 6):  # also by way of a run of decode steps
        rows = [(slot, len(p) + number - 1, 1) for slot, p in enumerate(PROMPTS)]
        wanted = [alone(p, number + 1)[-1] for p in PROMPTS]
        batch = constrained(step(rows), {2: [wanted[2]]}) if number == 3 else step(rows)
        assert plane.tokens(batch) == wanted


def test_a_step_that_goes_on_from_the_last_one_is_checked_all_the_same() -> None:
    plane = Plane()
    plane.tokens(first_step())
    rows = [(slot, len(prompt), 1) for slot, prompt in enumerate(PROMPTS)]
    plane.tokens(step(rows))
    batch = step([(slot, position + 1, 1) for slot, position, _ in rows])
    with pytest.raises(InvalidBatch, match="allows no token"):
        plane.run(constrained(batch, {1: []}))
    assert plane.tokens(constrained(batch, {1: list(b"z")}))[1] == ord("z")


def test_every_sample_of_a_row_keeps_to_its_constraint() -> None:
    keys = [SamplingKey(1.0, 1.0, 5, index) for index in range(3)]
    starts = [start(slot, b"abc", range(7), key) for slot, key in enumerate(keys)]
    batch = step([(0, 0, 3)], sampled=[0, 0, 0], sampled_slots=[0, 1, 2], starts=starts)
    assert set(Plane().tokens(constrained(batch, {0: list(b"pq")}))) <= set(b"pq")


@pytest.mark.parametrize("failed", [0, 1])
def test_constraints_follow_their_rows_past_rows_of_failed_slots(failed: int) -> None:
    plane = Plane()
    plane.run(first_step(), failed_rows={failed: "failed"})
    rows = [(slot, len(prompt), 1) for slot, prompt in enumerate(PROMPTS)]
    result = plane.run(constrained(step(rows), {failed: list(b"!"), 2: list(b"z")}))
    assert [failure.row for failure in result.row_failures] == [failed]
    assert result.sampled_token_ids[2] == ord("z")
    free = 1 - failed
    assert result.sampled_token_ids[free] == alone(PROMPTS[free], 2)[-1]


def test_constraints_stand_beside_drafts_of_other_rows() -> None:
    plane = Plane()
    plane.tokens(first_step())
    second = alone(PROMPTS[0], 2)[1]
    rows = [(slot, len(prompt), 1) for slot, prompt in enumerate(PROMPTS)]
    batch = replace(
        step(rows),
        query_lens=np.array([2, 1, 1]),
        draft_counts=np.array([1, 0, 0]),
        draft_ids=np.array([second]),
    )
    result = plane.run(constrained(batch, {2: list(b"z")}))
    assert result.kept_drafts.tolist() == [1, 0, 0]
    assert result.sampled_token_ids[2] == ord("z")


SONG_LENGTH = 14


@pytest.mark.wide
@settings(max_examples=30)
@given(data=st.data())
def test_drafts_keep_to_the_constraint_of_their_own_place(data: st.DataObject) -> None:
    allowed = [
        data.draw(st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=3))
        for _ in range(SONG_LENGTH)
    ]
    key = SamplingKey(0.8, 1.0, data.draw(st.integers(0, 9)), 0)
    first = step([(0, 0, 3)], starts=[start(0, PROMPTS[0], range(7), key)])
    plane = Plane()
    wanted = plane.tokens(constrained(first, {0: allowed[0]}))
    for number in range(1, SONG_LENGTH):
        batch = step([(0, 2 + number, 1)])
        wanted += plane.tokens(constrained(batch, {0: allowed[number]}))
    plane = Plane()
    text = plane.tokens(constrained(first, {0: allowed[0]}))
    while len(text) < SONG_LENGTH:
        most = min(4, SONG_LENGTH - len(text) - 1)
        drafts = wanted[len(text) :][: data.draw(st.integers(0, most))]
        if drafts and data.draw(st.booleans()):
            drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(
                st.sampled_from(ALPHABET)
            )
        batch = drafted(step([(0, 2 + len(text), 1)]), drafts)
        masks = [
            RowConstraint(0, mask(places), index)
            for index, places in enumerate(allowed[len(text) : len(text) + len(drafts) + 1])
        ]
        result = plane.run(replace(batch, constraints=data.draw(st.permutations(masks))))
        kept = int(result.kept_drafts[0]) if drafts else 0
        assert drafts[:kept] == wanted[len(text) : len(text) + kept]
        assert kept == len(drafts) or drafts[kept] != wanted[len(text) + kept]
        text += [*drafts[:kept], *result.sampled_token_ids.tolist()]
    assert text == wanted


def drafted(batch: StepBatch, drafts: Sequence[int]) -> StepBatch:
    """The batch with drafts for its only row."""
    return replace(
        batch,
        query_lens=np.array([1 + len(drafts)]),
        draft_counts=np.array([len(drafts)]),
        draft_ids=np.array(drafts, dtype=np.int64),
    )


@pytest.mark.parametrize(
    ("places", "field", "said"),
    [
        ([0], "constraints", "has 1 for row 0, of 3 samples"),
        ([0, 1], "constraints", "has 2 for row 0, of 3 samples"),
        ([0, 1, 3], "constraints[2].num_drafts", "at most 2"),
        ([0, 1, 2, 1], "constraints[3].row", "repeats 0 behind 1 drafts"),
    ],
)
def test_a_row_with_drafts_has_a_constraint_for_each_sample_or_none(
    places: Sequence[int], field: str, said: str
) -> None:
    plane = Plane()
    plane.tokens(step([(0, 0, 3)], starts=[start(0, PROMPTS[0], range(7))]))
    batch = drafted(step([(0, 3, 1)]), [1, 2])
    masks = [RowConstraint(0, mask(list(ALPHABET)), place) for place in places]
    with pytest.raises(InvalidBatch, match=said) as refused:
        plane.run(replace(batch, constraints=masks))
    assert refused.value.field == field
    assert plane.run(batch).sampled_token_ids.size == 1


def test_a_row_without_drafts_has_no_constraint_behind_one() -> None:
    batch = step([(0, 0, 3)], starts=[start(0, PROMPTS[0], range(7))])
    with pytest.raises(InvalidBatch, match="at most 0") as refused:
        Plane().run(replace(batch, constraints=[RowConstraint(0, mask(list(ALPHABET)), 1)]))
    assert refused.value.field == "constraints[0].num_drafts"


@pytest.mark.parametrize(("vocab_size", "last"), [(8, 0x80), (9, 0x01), (15, 0x40), (16, 0x80)])
def test_bits_behind_the_vocabulary_allow_nothing(vocab_size: int, last: int) -> None:
    limits = SlotLimits(8, 8, 64, 4, 64, vocab_size, 40)
    allowed = np.zeros(-(-vocab_size // 8), dtype=np.uint8)
    allowed[-1] = last
    check_constraints(replace(step([(0, 0, 1)]), constraints=[RowConstraint(0, allowed)]), limits)
    allowed[-1] = 0xFF & ~(2 * last - 1)
    with pytest.raises(InvalidBatch, match="allows no token"):
        check_constraints(
            replace(step([(0, 0, 1)]), constraints=[RowConstraint(0, allowed)]), limits
        )


def test_planes_say_that_they_keep_to_constraints() -> None:
    assert {"constraints", "draft_constraints"} <= set(features_of(LIMITS))
