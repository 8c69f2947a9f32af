"""Rows go on from the states of their slots: what is checked, and what the executor is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu.pieces import sort_tokens
from compute_plane.cpu.state_rows import state_rows
from compute_plane.errors import BatchRefused, InvalidBatch, UnsupportedBatch
from compute_plane.executor.batch_checks import features_of
from compute_plane.executor.interface import StateCopy
from compute_plane.executor.step import StepBatch
from compute_plane.executor.token_layout import TokenLayout
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, start, step

WITH_STATES = replace(LIMITS, num_states=12)


def plane() -> Plane:
    """Return one on which slot 0 has taken in "hello" and a token of its own."""
    made = Plane(WITH_STATES)
    made.run(step([(0, 0, 5)], starts=[start(0, b"hello", [7, 2])]))
    made.run(step([(0, 5, 1)]))
    return made


def copying(batch: StepBatch, *pairs: tuple[int, int]) -> StepBatch:
    return replace(batch, state_copies=[StateCopy(*pair) for pair in pairs])


def test_every_row_has_the_state_of_its_slot() -> None:
    made = plane()
    made.run(step([(3, 0, 3), (0, 6, 1)], starts=[start(3, b"new", [9])]))
    assert [batch.states.tolist() for batch in made.batches] == [[0], [0], [3, 0]]
    made.run(step([(3, 3, 1), (0, 7, 1)]))
    made.run(step([(3, 4, 1), (0, 8, 1)], new_blocks=[[11], [12]]))  # goes on where that stopped
    assert made.batches[-1].states.tolist() == [3, 0]


def test_models_without_states_are_told_of_none() -> None:
    made = Plane()
    made.run(step([(3, 0, 3)], starts=[start(3, b"new", [9])]))
    assert made.batches[0].states.size == 0


def test_a_slot_that_starts_behind_its_beginning_needs_the_state_of_that_place() -> None:
    made = plane()
    begun = step([(1, 4, 2)], starts=[start(1, b"hell!!", [7, 3])])
    message = (
        r"positions\[0\] must be 0 or the number of tokens in the state of slot 1 \(0\), got 4"
    )
    with pytest.raises(InvalidBatch, match=message):
        made.run(begun)
    with pytest.raises(InvalidBatch, match=r"in the state of slot 1 \(6\), got 4"):
        made.run(copying(begun, (0, 1)))
    again = step([(2, 0, 4)], sampled=[], starts=[start(2, b"hello", [7, 5])])
    made.run(again)
    made.run(copying(begun, (2, 11), (11, 1)))
    assert made.batches[-1].state_copies == [(2, 11), (11, 1)]


def test_a_refused_batch_copies_no_state() -> None:
    made = plane()
    begun = step([(1, 6, 1)], starts=[start(1, b"hell!!!", [7, 3])])
    with pytest.raises(BatchRefused):
        made.run(copying(step([(0, 9, 1)]), (0, 1)))
    with pytest.raises(InvalidBatch, match=r"state of slot 1 \(0\), got 6"):
        made.run(begun)
    made.run(copying(begun, (0, 1)))


def test_copies_of_a_step_without_rows_are_made_in_the_next_one() -> None:
    made = plane()
    made.run(copying(step(), (0, 9)))
    made.run(copying(step([(0, 6, 1)]), (9, 10)))
    assert made.batches[-1].state_copies == [(0, 9), (9, 10)]
    made.run(step([(0, 7, 1)]))
    assert made.batches[-1].state_copies == []


def test_who_copies_the_state_of_a_failed_row_is_refused_nothing() -> None:
    """Rows that were sent before the failure was known are left out, and harm nobody else."""
    made = plane()
    made.run(step([(0, 6, 1)]), failed_rows={0: "not finite"})
    left_out = made.run(step([(0, 7, 1)]))
    assert [failure.row for failure in left_out.row_failures] == [0]
    begun = step([(1, 8, 1)], starts=[start(1, b"whatever!", [7, 3, 4])])
    assert not made.run(copying(begun, (0, 1))).row_failures


def test_nobody_goes_on_from_a_state_that_a_failed_step_was_to_copy() -> None:
    made = plane()
    start_of_1 = start(1, b"hello...", [7, 3])
    failing = copying(step([(0, 6, 1)], starts=[start_of_1]), (0, 1), (0, 10))
    made.slots.poison(made.slots.prepare(failing))
    result = made.run(step([(1, 6, 1)]))
    assert [failure.row for failure in result.row_failures] == [0]
    begun = step([(2, 6, 1)], starts=[start(2, b"hello...", [7, 4])])
    with pytest.raises(InvalidBatch, match=r"state of slot 2 \(-1\), got 6"):
        made.run(copying(begun, (10, 2)))


def test_samples_of_one_row_need_copies_in_the_next_step() -> None:
    made = Plane(WITH_STATES)
    starts = [start(slot, b"twins", [7, 2]) for slot in (0, 1)]
    made.run(step([(0, 0, 5)], sampled=[0, 0], sampled_slots=[0, 1], starts=starts))
    both = step([(0, 5, 1), (1, 5, 1)], new_blocks=[[3], [4]])
    with pytest.raises(InvalidBatch, match=r"state of slot 1 \(0\), got 5"):
        made.run(both)


@pytest.mark.parametrize(
    ("limits", "pairs", "error", "words"),
    [
        (
            WITH_STATES,
            [(0, 3), (12, 1)],
            InvalidBatch,
            r"state_copies\[1\].source must be below 12",
        ),
        (WITH_STATES, [(0, 12)], InvalidBatch, r"\[0\].destination must be below 12, got 12"),
        (LIMITS, [(0, 1)], UnsupportedBatch, "the model of this plane has no states"),
    ],
)
def test_copies_of_states_that_there_are_not_are_refused(limits, pairs, error, words) -> None:
    with pytest.raises(error, match=words):
        Plane(limits).run(copying(step(), *pairs))


def test_a_state_is_not_taken_back_so_there_are_no_drafts() -> None:
    assert {"drafts", "draft_constraints"} <= set(features_of(LIMITS))
    features = set(features_of(WITH_STATES))
    assert "states" in features
    assert features.isdisjoint({"drafts", "draft_constraints"})
    drafted = replace(step([(0, 6, 2)]), draft_counts=np.array([1]), draft_ids=np.array([65]))
    with pytest.raises(UnsupportedBatch, match="draft_ids: the model of this plane has states"):
        plane().run(drafted)


def test_rows_of_a_piece_are_found_with_their_states() -> None:
    rows = state_rows(
        np.array([1, 1, 1, 2, 4, 4], np.int32),
        np.array([0, 1, 2, 9, 5, 6], np.int32),
        np.array([40, 41, 42, 43, 44], np.int32),
    )
    assert rows.tolist() == [[0, 3, 41, 1], [3, 1, 42, 0], [4, 2, 44, 0]]


def test_pieces_of_prompts_come_first_where_tokens_leave_a_state_to_those_behind() -> None:
    """A sequence that is computed anew has prompt and generated tokens in one row."""
    positions = np.arange(6, dtype=np.int32)
    rows = np.zeros(6, np.int32)
    layout = TokenLayout(
        rows, positions, rows, positions.astype(np.int64), rows.reshape(1, -1), np.array([6])
    )
    tokens = sort_tokens(layout, np.array([4], np.int32))
    for first, expected in ((True, [0, 1, 2, 3, 4, 5]), (False, [4, 5, 0, 1, 2, 3])):
        found = [
            position
            for piece in tokens.pieces(3, prompts_first=first)
            for position in tokens.layout.positions[piece.first : piece.end].tolist()
        ]
        assert found == expected
