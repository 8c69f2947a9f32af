"""What became of guesses says how likely the next ones are right."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.executor.draft_odds import MEMORY, NUM_CLASSES, DraftOdds

MIDDLES = [(number + 0.5) / NUM_CLASSES for number in range(NUM_CLASSES)]


def noted(odds: DraftOdds, likelihood: float, *, is_right: bool, times: int = 1) -> float:
    """Return the chance of a greedy guess once that many were right or wrong."""
    for _ in range(times):
        odds.note(likelihood, is_greedy=True, is_right=is_right)
    return odds.of(likelihood, is_greedy=True)


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("middle", MIDDLES)
def test_before_any_guess_tokens_are_right_as_often_as_those_of_their_class_are_likely(
    middle: float, is_greedy: bool
) -> None:
    for likelihood in (middle - 0.049, middle, middle + 0.049):
        assert DraftOdds().of(likelihood, is_greedy=is_greedy) == pytest.approx(middle)


@pytest.mark.parametrize("likelihood", MIDDLES)
def test_right_guesses_raise_the_chance_and_wrong_ones_lower_it(likelihood: float) -> None:
    odds = DraftOdds()
    chances = [odds.of(likelihood, is_greedy=True)]
    chances += [noted(odds, likelihood, is_right=True) for _ in range(20)]
    assert all(before < after for before, after in itertools.pairwise(chances))
    chances = [noted(odds, likelihood, is_right=False) for _ in range(20)]
    assert all(before > after for before, after in itertools.pairwise(chances))


def test_a_single_guess_moves_the_chance_a_little_and_many_move_it_to_what_they_say() -> None:
    odds = DraftOdds()
    assert 0.25 < noted(odds, 0.25, is_right=True) < 0.4
    assert noted(odds, 0.25, is_right=True, times=200) > 0.95
    odds = DraftOdds()
    for number in range(2000):
        odds.note(0.95, is_greedy=True, is_right=number % 4 == 0)
    assert odds.of(0.95, is_greedy=True) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_greedy_texts_and_sampled_ones_are_counted_apart(is_greedy: bool) -> None:
    odds = DraftOdds()
    for _ in range(50):
        odds.note(0.55, is_greedy=is_greedy, is_right=True)
    assert odds.of(0.55, is_greedy=is_greedy) > 0.9
    assert odds.of(0.55, is_greedy=not is_greedy) == pytest.approx(0.55)


@pytest.mark.parametrize("place", range(NUM_CLASSES))
def test_guesses_of_one_class_say_nothing_of_another(place: int) -> None:
    odds = DraftOdds()
    chance = noted(odds, MIDDLES[place], is_right=False, times=20)
    assert chance < MIDDLES[place]
    for other in {*range(NUM_CLASSES)} - {place}:
        assert odds.of(MIDDLES[other], is_greedy=True) == pytest.approx(MIDDLES[other])
    assert odds.of(MIDDLES[place] + 0.04, is_greedy=True) == chance


@pytest.mark.parametrize(("likelihood", "middle"), [(0.0, MIDDLES[0]), (1.0, MIDDLES[-1])])
def test_the_least_and_the_most_likely_are_in_the_outer_classes(
    likelihood: float, middle: float
) -> None:
    odds = DraftOdds()
    assert odds.of(likelihood, is_greedy=True) == pytest.approx(middle)
    chance = noted(odds, likelihood, is_right=False, times=5)
    assert chance == odds.of(middle, is_greedy=True) < middle


def test_a_likelihood_rounded_to_more_than_one_is_in_the_last_class() -> None:
    assert DraftOdds().of(1.0000001, is_greedy=False) == pytest.approx(MIDDLES[-1])


@pytest.mark.parametrize("memories", [1, 10])
@pytest.mark.parametrize(("likelihood", "is_right"), [(0.95, True), (0.05, False)])
def test_fewer_guesses_than_are_remembered_turn_the_chance_round(
    likelihood: float, is_right: bool, memories: int
) -> None:
    odds = DraftOdds()
    before = noted(odds, likelihood, is_right=is_right, times=memories * int(MEMORY))
    after = noted(odds, likelihood, is_right=not is_right, times=int(MEMORY) - 1)
    if not is_right:
        before, after = 1 - before, 1 - after
    assert before > 0.9
    assert after < 0.5


def test_old_guesses_count_for_some_time() -> None:
    odds = DraftOdds()
    noted(odds, 0.55, is_right=True, times=2 * int(MEMORY))
    assert noted(odds, 0.55, is_right=False, times=int(MEMORY) // 8) > 0.7


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.booleans(), st.booleans(), st.sampled_from((1, 5, 300))),
        max_size=8,
    )
)
def test_chances_are_between_none_and_certainty(
    guesses: list[tuple[float, bool, bool, int]],
) -> None:
    odds = DraftOdds()
    for likelihood, is_greedy, is_right, times in guesses:
        for _ in range(times):
            odds.note(likelihood, is_greedy=is_greedy, is_right=is_right)
        assert 0 <= odds.of(likelihood, is_greedy=is_greedy) <= 1
    for likelihood in (0.0, *MIDDLES, 1.0):
        for is_greedy in (True, False):
            assert 0 <= odds.of(likelihood, is_greedy=is_greedy) <= 1


@pytest.mark.parametrize("is_greedy", [True, False])
def test_what_is_not_guessed_any_more_is_tried_again_some_time(is_greedy: bool) -> None:
    odds = DraftOdds()
    for _ in range(200):
        odds.note(0.55, is_greedy=is_greedy, is_right=False)
    lowest = odds.of(0.55, is_greedy=is_greedy)
    others = odds.of(0.75, is_greedy=is_greedy), odds.of(0.55, is_greedy=not is_greedy)
    assert lowest < 0.1
    chances = []
    for _ in range(600):
        odds.forget_some(0.55, is_greedy=is_greedy)
        chances.append(odds.of(0.55, is_greedy=is_greedy))
    assert chances == sorted(chances)
    assert chances[0] < 0.1
    assert chances[200] > 0.2
    assert chances[-1] == pytest.approx(0.55, abs=0.01)
    assert others == (odds.of(0.75, is_greedy=is_greedy), odds.of(0.55, is_greedy=not is_greedy))
