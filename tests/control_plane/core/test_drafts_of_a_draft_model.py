"""Which rows ask the draft model for drafts, which steps wait for them, and what they become."""

from __future__ import annotations

from itertools import pairwise

import pytest

from control_plane.core.batch import StepResult
from planes.errors import SchedulerError
from tests.control_plane.core.drafting_desk import EOS, Desk, drafts_of

TEXT = list(range(10, 50))
"""It never repeats itself, so that prompt lookup finds nothing."""


def desk_with_a_model(**options: object) -> Desk:
    options = {"tokens": 3, **options}
    config = {"draft_model": True, **options.pop("config", {})}  # type: ignore[dict-item]
    return Desk(config=config, **options)  # type: ignore[arg-type]


def wrong(tokens: list[int]) -> list[int]:
    return [token + 1 for token in tokens]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_guesses_take_a_fraction_of_the_steps_and_give_the_same_text(depth: int) -> None:
    desk = desk_with_a_model(depth=depth, block_size=64)
    desk.add([1, 2, 3], TEXT)
    desk.run()
    assert desk.text(1) == TEXT
    # The prompt's step, the first token's, then four tokens a step.
    assert len(desk.sent) <= 2 + len(TEXT) // 4 + 1
    stats = desk.scheduler.get_stats()
    assert stats.num_kept_drafts == stats.num_drafts >= 27
    assert [len(event.new_token_ids) for event in desk.events] == [1] * len(TEXT)


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_plane_without_a_draft_model_is_asked_for_nothing(tokens: int) -> None:
    desk = Desk(tokens=tokens)
    desk.add([1, 2, 3], TEXT)
    desk.run()
    assert not any(output.batch.wanted_drafts for output in desk.sent)


def test_without_speculative_tokens_a_draft_model_is_asked_for_nothing() -> None:
    desk = desk_with_a_model(tokens=0)
    desk.add([1, 2, 3], TEXT)
    desk.run()
    assert not any(output.batch.wanted_drafts for output in desk.sent)


def test_a_step_that_asks_is_followed_by_none_before_its_result() -> None:
    desk = desk_with_a_model(depth=3)
    desk.add([1, 2, 3], TEXT)
    assert desk.send() is not None  # the prompt
    asking = desk.send()
    assert asking is not None
    assert asking.batch.wanted_drafts == [3]
    assert desk.send() is None
    desk.answer()
    assert desk.send() is None
    desk.answer()
    following = desk.send()
    assert following is not None
    assert following.batch.draft_ids == TEXT[2:5]


def test_prompts_ask_for_nothing_nor_do_rows_beside_them() -> None:
    desk = desk_with_a_model(depth=1)
    desk.add([1, 2, 3], TEXT)
    desk.send()
    desk.answer()
    desk.add([4, 5, 6], TEXT)
    output = desk.send()
    assert output is not None
    assert output.prefill_request_ids
    assert output.batch.wanted_drafts == []


def test_rows_share_the_room_of_a_step_and_many_rows_ask_for_nothing() -> None:
    wanted = {}
    for num_rows in (1, 2, 3, 4, 5):
        desk = desk_with_a_model(tokens=7, depth=1, block_size=64)
        for _ in range(num_rows):
            desk.add([1, 2, 3], TEXT)
        desk.send()
        desk.answer()
        output = desk.send()
        assert output is not None
        wanted[num_rows] = output.batch.wanted_drafts
        desk.run()
        for request_id in range(1, num_rows + 1):
            assert desk.text(request_id) == TEXT
    assert wanted == {1: [7], 2: [3, 3], 3: [1, 1, 1], 4: [1, 1, 1, 1], 5: []}


def test_after_guesses_of_which_none_was_right_the_model_is_not_asked_for_a_while() -> None:
    desk = desk_with_a_model(depth=1, block_size=64, guess=wrong)
    desk.add([1, 2, 3], TEXT)
    desk.run()
    assert desk.text(1) == TEXT
    tried = [output.batch.positions[0] for output in desk.sent if drafts_of(output)]
    # Pauses of 2, 4, 8, 16 tokens, and a token in which the model is asked again.
    assert [after - before for before, after in pairwise(tried)] == [3, 5, 9, 17][: len(tried) - 1]
    assert len(tried) >= 4
    asked = sum(bool(output.batch.wanted_drafts) for output in desk.sent)
    assert asked <= 2 * len(tried) + 1


def test_a_pause_ends_with_a_guess_that_is_right() -> None:
    desk = desk_with_a_model(depth=1, block_size=64, guess=wrong)
    desk.add([1, 2, 3], TEXT)
    while len(desk.text(1)) < 6:
        desk.send()
        desk.answer()
    desk.guess = list
    num_before = len(desk.sent)
    desk.run()
    stats = desk.scheduler.get_stats()
    assert stats.num_kept_drafts >= 15
    assert len(desk.sent) - num_before <= 20


def test_drafts_end_with_the_block_and_before_the_last_token() -> None:
    desk = desk_with_a_model(block_size=4, depth=1)
    desk.add([1] * 5, TEXT[:20])
    desk.run()
    spans = [
        (output.batch.positions[0], output.batch.query_lens[0])
        for output in desk.sent
        if drafts_of(output)
    ]
    assert all(first // 4 == (first + count - 1) // 4 for first, count in spans)
    assert len(spans) > 3
    assert all(first + count < 5 + 20 for first, count in spans)
    assert desk.text(1) == TEXT[:20]


def test_a_guess_never_ends_a_text() -> None:
    desk = desk_with_a_model(depth=1, block_size=64)
    desk.add([1, 2, 3], [4, 5, 6, EOS, *[0] * 20])
    desk.run()
    assert all(EOS not in output.batch.draft_ids for output in desk.sent)
    assert desk.text(1) == [4, 5, 6]


def test_a_text_that_repeats_itself_is_drafted_from_itself() -> None:
    song = [1, 2, 3, 4, 5, 6, 7, 8]
    desk = desk_with_a_model(tokens=5, depth=1, block_size=64, guess=wrong)
    desk.add(song * 2, song * 3)
    desk.run()
    assert desk.text(1) == song * 3
    copying = [output for output in desk.sent if drafts_of(output)]
    assert len(copying) >= 3
    assert not any(any(output.batch.wanted_drafts) for output in copying)


def test_a_guess_that_comes_too_late_is_not_sent() -> None:
    """A row that was computed anew meanwhile stands where it was: only then it may use it."""
    desk = desk_with_a_model(depth=1, block_size=64)
    desk.add([1, 2, 3], TEXT)
    desk.send()
    desk.answer()
    desk.send()
    desk.answer()
    desk.add([1, 2, 9], TEXT)
    desk.send()  # the new prompt: the row beside it has one token and no drafts
    desk.answer()
    output = desk.send()
    assert output is not None
    assert not any(drafts_of(output))
    desk.run()
    assert desk.text(1) == desk.text(2) == TEXT


def test_a_row_at_the_end_of_its_block_asks_for_nothing() -> None:
    desk = desk_with_a_model(depth=1, block_size=4, guess=lambda _: [])
    desk.add([1, 2, 3], TEXT)
    desk.run()
    # A sample behind position 4 i + 2 is the last of its block: no draft is left room for.
    asked = {o.batch.positions[0] for o in desk.sent if o.batch.wanted_drafts}
    assert asked
    assert not any(position % 4 == 2 for position in asked)


def test_a_short_answer_is_not_worth_reading_its_prompt() -> None:
    for length, is_asked in ((15, False), (40, True)):
        desk = desk_with_a_model(depth=1, block_size=64)
        desk.add([1, 2, 3], TEXT[:length])
        desk.run()
        assert any(output.batch.wanted_drafts for output in desk.sent) is is_asked


def test_who_never_has_a_guess_is_asked_ever_less_often() -> None:
    desk = desk_with_a_model(depth=1, block_size=256, guess=lambda _: [])
    song = [10 + 7 * i % 83 for i in range(160)]
    desk.add([1, 2, 3], song)
    desk.run()
    asked = [output.batch.positions[0] for output in desk.sent if output.batch.wanted_drafts]
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps[:7] == [1] * 7
    assert gaps[7:] == [3, 5, 9, 17, 33, 65][: len(gaps) - 7]
    assert len(gaps) >= 11


@pytest.mark.parametrize("next_drafts", [{0: [1, 2, 3, 4]}, {1: [1]}])
def test_drafts_that_nobody_wanted_are_the_planes_fault(next_drafts: dict[int, list[int]]) -> None:
    desk = desk_with_a_model(depth=1)
    desk.add([1, 2, 3], TEXT)
    desk.send()
    desk.answer()
    output = desk.send()
    assert output is not None
    result = StepResult(output.batch.step_id, [TEXT[1]], next_drafts=next_drafts)
    with pytest.raises(SchedulerError, match="wants drafts of rows"):
        desk.scheduler.commit(result)
