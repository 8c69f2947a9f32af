"""Which constrained rows get drafts, what goes with them, and whom that keeps waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from control_plane.core.batch import RowConstraint, RowFailure, StepResult
from control_plane.core.constraint import Draft
from control_plane.core.drafting import _MOST_ROWS
from control_plane.core.request import FinishReason
from control_plane.core.token_masks import of_both
from tests.control_plane.core.drafting_desk import EOS, OPEN, Desk, drafts_of

SONG = list(range(10, 34))


def mask(num_tokens: int) -> bytes:
    """Stands for what may follow so many tokens of a song, which is any of its tokens."""
    return b"\xff" * 8 + b"after %d" % num_tokens


@dataclass(eq=False)
class Form:
    """A constraint that expects `song`; `told`: what it was told at once, each time."""

    song: Sequence[int]
    breaks_at: int | None = None
    told: list[list[int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    error: str | None = None
    is_complete: bool = False

    @property
    def place(self) -> int:
        return sum(map(len, self.told))

    @property
    def allowed_tokens(self) -> bytes:
        return mask(self.place)

    @property
    def constrainer(self) -> Form:
        return self

    def draft(self, most: int) -> Sequence[Draft]:
        self.asked.append(most)
        expected = self.song[self.place : self.place + most]
        return [Draft(token, mask(self.place + i + 1)) for i, token in enumerate(expected)]

    def advance(self, taken: Sequence[tuple[object, Sequence[int]]]) -> None:
        for form, tokens in taken:
            assert isinstance(form, Form)
            form.told.append(list(tokens))
            if form.place == form.breaks_at:
                form.error = "it breaks"


def desk_of(tokens: int = 7, **more: object) -> Desk:
    return Desk(tokens=0, config={"grammar_drafts": tokens}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_form_that_is_kept_to_takes_a_quarter_of_the_steps(depth: int) -> None:
    desk = desk_of(depth=depth)
    form = Form(SONG)
    desk.add([1], SONG, form)
    desk.run()
    assert desk.text(1) == SONG
    assert len(desk.sent) == 1 + 4  # the first token, then to the ends of blocks of 16
    assert [token for told in form.told for token in told] == SONG
    assert [len(told) for told in form.told] == [1, 8, 7, 7, 1]
    stats = desk.scheduler.get_stats()
    assert stats.num_drafts == stats.num_kept_drafts == 19
    assert [len(event.new_token_ids) for event in desk.events] == [1] * len(SONG)


def test_each_draft_has_the_mask_of_its_own_place() -> None:
    desk = desk_of(tokens=2)
    desk.add([1], SONG, Form(SONG))
    desk.send()
    desk.answer()
    output = desk.send()
    assert drafts_of(output) == [2]
    assert output is not None
    assert output.batch.draft_ids == SONG[1:3]
    assert list(output.batch.constraints) == [
        RowConstraint(0, mask(1)),
        RowConstraint(0, mask(2), 1),
        RowConstraint(0, mask(3), 2),
    ]


def test_a_form_that_may_not_end_yet_drafts_nothing() -> None:
    desk = desk_of(depth=1)
    form = Form(SONG)
    desk.add([1], SONG, form, min_tokens=4)
    desk.run()
    assert desk.text(1) == SONG
    assert [len(told) for told in form.told][:5] == [1, 1, 1, 1, 8]
    held = [output.batch.constraints[0].allowed_tokens for output in desk.sent[:5]]
    expected = [of_both(mask(place), OPEN) for place in range(4)]
    assert held == [*expected, mask(4)]
    assert held[0] != mask(0)


def test_what_a_form_expects_and_a_text_does_not_say_is_not_in_it() -> None:
    desk = desk_of()
    form = Form([*SONG[:3], 7, 7, 7])
    desk.add([1], SONG, form)
    desk.send()
    desk.answer()
    assert drafts_of(desk.send()) == [5]
    assert [event.new_token_ids for event in desk.answer()] == [(11,), (12,), (13,)]
    assert form.told == [[10], [11, 12, 13]]
    stats = desk.scheduler.get_stats()
    assert (stats.num_drafts, stats.num_kept_drafts) == (5, 2)


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_nobody_waits_for_the_drafts_of_a_constraint(speculative_tokens: int) -> None:
    desk = Desk(tokens=speculative_tokens, config={"grammar_drafts": 7})
    desk.add([1], SONG, Form(SONG))
    desk.add([1, 2], SONG)
    desk.send()
    desk.answer()
    assert drafts_of(desk.send()) == [6, 0]
    output = desk.send()  # of the other row alone, though the last step has no result yet
    assert drafts_of(output) == []
    assert output is not None
    assert output.decode_request_ids == [2]
    desk.run()
    assert desk.text(1) == desk.text(2) == SONG


def test_drafts_of_both_kinds_share_a_step_that_is_waited_for() -> None:
    desk = Desk(tokens=3, config={"grammar_drafts": 2, "prompt_lookup_min": 2})
    desk.add([1, 5, 6, 7, 8, 1], [5, 6, 7, 8, 9, 9, 9])
    desk.add([1, 2], SONG, Form(SONG))
    desk.send()
    desk.answer()
    output = desk.send()
    assert drafts_of(output) == [3, 2]
    assert output is not None
    assert output.batch.draft_ids == [6, 7, 8, *SONG[1:3]]
    assert [row for row, *_ in output.batch.constraints] == [1, 1, 1]
    assert desk.send() is None


def test_constrained_rows_share_the_drafts_of_a_step_alike_and_many_have_none() -> None:
    desk = desk_of(depth=1)
    for _ in range(3):
        desk.add([1], SONG, Form(SONG))
    desk.send()
    desk.answer()
    assert drafts_of(desk.send()) == [2, 2, 1]
    crowd = desk_of(depth=1)
    for _ in range(_MOST_ROWS):
        crowd.add([1], SONG, Form(SONG))
    for _ in range(9):
        assert drafts_of(crowd.send()) == []
        crowd.answer()


def test_what_one_constraint_does_not_expect_is_left_to_the_others() -> None:
    desk = desk_of(depth=1)
    for song in (SONG[:1], SONG, SONG):
        desk.add([1], SONG, Form(song))
    desk.send()
    desk.answer()
    assert drafts_of(desk.send()) == [0, 3, 2]


@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": (13,)}])
def test_a_token_that_would_end_the_text_is_no_draft(ends: dict[str, tuple[int, ...]]) -> None:
    end = ends["stop_token_ids"][0] if ends else EOS
    song = [10, 11, 12, end, *range(14, 24)]
    desk = desk_of()
    form = Form(song)
    desk.add([1], song, form, **ends)
    desk.send()
    desk.answer()
    output = desk.send()
    assert drafts_of(output) == [2]
    assert output is not None
    assert [num_drafts for *_, num_drafts in output.batch.constraints] == [0, 1, 2]
    desk.answer()
    assert desk.text(1) == song[:3]
    assert desk.events[-1].finish_reason is FinishReason.STOP
    assert form.told == [[10]]  # what ends with the sample needs no telling


def test_drafts_end_with_the_block_and_before_the_last_token() -> None:
    desk = desk_of(block_size=4)
    form = Form(SONG)
    desk.add([1, 1], SONG[:10], form)
    desk.run()
    assert form.asked == [1, 3, 1]
    assert [len(told) for told in form.told] == [1, 2, 4, 2, 1]


def test_a_constraint_that_breaks_behind_drafts_fails_its_request_and_keeps_them() -> None:
    desk = desk_of(tokens=2)
    desk.add([1], SONG, Form(SONG, breaks_at=4))
    desk.send()
    desk.answer()
    desk.send()
    *drafts, end = desk.answer()
    assert [event.new_token_ids for event in drafts] == [(11,), (12,)]
    assert (end.new_token_ids, end.error) == ((), "it breaks")
    assert not desk.scheduler.has_pending_work()


def test_a_cancelled_request_gets_nothing_of_what_was_drafted() -> None:
    desk = desk_of()
    form = Form(SONG)
    desk.add([1], SONG, form)
    desk.send()
    desk.answer()
    assert drafts_of(desk.send()) == [7]
    desk.scheduler.cancel(1)
    assert desk.answer() == []
    assert form.told == [[10]]
    assert not desk.scheduler.has_pending_work()
    assert desk.scheduler.get_memory_stats().used_blocks == 0


def test_without_the_setting_no_constraint_is_asked() -> None:
    desk = Desk(tokens=3)
    form = Form(SONG)
    desk.add([1], SONG, form)
    desk.run()
    assert form.asked == []
    assert desk.scheduler.get_stats().num_drafts == 0


def test_a_lost_plane_leaves_a_constraint_where_its_tokens_end() -> None:
    desk = desk_of()
    form = Form(SONG)
    desk.add([1], SONG, form)
    desk.send()
    desk.answer()
    output = desk.send()
    assert drafts_of(output) == [7]
    desk.in_flight.clear()
    desk.scheduler.lose_epoch()
    again = desk.send()
    assert again is not None
    assert again.prefill_request_ids == [1]
    assert list(again.batch.constraints) == [RowConstraint(0, mask(1))]
    events = desk.scheduler.commit(StepResult(again.batch.step_id, [11]))
    assert [event.new_token_ids for event in events] == [(11,)]
    assert form.told == [[10], [11]]


def test_drafts_that_read_the_block_of_a_failed_row_are_not_taken() -> None:
    desk = desk_of(tokens=2, block_size=4, caches=True, depth=1)
    prompt = [1, 2, 3, 4, 5]
    desk.add(prompt, SONG)
    desk.send()
    desk.answer()
    form = Form(SONG)
    desk.add(prompt, SONG, form)
    while sum(map(len, form.told)) < 2:
        desk.send()
        desk.answer()
    assert desk.requests[2].cached_tokens == 4
    output = desk.send()
    assert drafts_of(output) == [0, 2]
    assert output is not None
    desk.in_flight.clear()
    before = desk.text(2)
    kept = StepResult(
        output.batch.step_id,
        [-1, SONG[len(before) + 2]],
        row_failures=(RowFailure(0, "no numbers"),),
        kept_drafts=[0, 2],
    )
    events = desk.scheduler.commit(kept)
    assert [event.request_id for event in events] == [1]
    assert desk.text(2) == [token for told in form.told for token in told] == before
    desk.run()
    assert desk.text(2) == SONG
    assert [token for told in form.told for token in told] == SONG
