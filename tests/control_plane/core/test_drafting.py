"""Which rows get drafts, which steps wait for a result, and what a kept draft is."""

from __future__ import annotations

import pytest

from control_plane.core.batch import RowConstraint, StepResult, TokenLogprobs
from control_plane.core.drafting import _MOST_ROWS
from control_plane.core.prompt_lookup import PromptLookup
from control_plane.core.request import FinishReason
from control_plane.core.scheduler import SchedulerConfig
from planes.errors import ConfigError, SchedulerError
from tests.control_plane.core.drafting_desk import EOS, OPEN, Desk, drafts_of

SONG = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_text_that_repeats_its_prompt_takes_a_third_of_the_steps(depth: int) -> None:
    desk = Desk(depth=depth)
    desk.add(SONG * 2, SONG * 3)
    desk.run()
    assert desk.text(1) == SONG * 3
    assert len(desk.sent) <= 8
    stats = desk.scheduler.get_stats()
    assert stats.num_kept_drafts == stats.num_drafts >= 16
    assert [len(event.new_token_ids) for event in desk.events] == [1] * 24
    assert desk.events[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_may_not_end_yet_is_masked_one_by_one_and_waits_for_nothing(depth: int) -> None:
    desk = Desk(depth=depth)
    desk.add(SONG * 2, SONG * 3, min_tokens=5)
    for _ in range(depth):
        assert desk.send() is not None  # no step waits for another's token
    desk.run()
    assert desk.text(1) == SONG * 3
    held, free = desk.sent[:5], desk.sent[5:]
    assert [list(output.batch.constraints) for output in held] == [[RowConstraint(0, OPEN)]] * 5
    assert not any(drafts_of(output) for output in held)
    assert not any(output.batch.constraints for output in free)
    # The row of the sixth token may have drafts at once, where its newest token is known.
    assert any(drafts_of(output) for output in (free[:1] if depth == 1 else free))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_drafts_nothing_waits(depth: int) -> None:
    desk = Desk(tokens=0, depth=depth)
    desk.add(SONG * 2, SONG * 3)
    for _ in range(depth):
        assert desk.send() is not None
    assert all(output.batch.draft_counts == [] for output in desk.sent)


def test_a_text_that_never_repeats_itself_keeps_two_steps_under_way() -> None:
    desk = Desk()
    desk.add([1, 2, 3], range(10, 50))
    desk.send()
    while desk.in_flight[-1].batch.positions[0] < 40:
        assert desk.send() is not None
        desk.answer()
    assert desk.scheduler.get_stats().num_drafts == 0


def test_a_step_waits_where_the_known_text_has_been_seen_and_none_follows_one_with_drafts() -> None:
    desk = Desk()
    desk.add([*SONG, 1, 2], [3, 4, 5, 6, 7, 8, 9, 9])
    desk.send()
    desk.answer()  # 3 is known, so 1 2 3 is, and all that is known
    output = desk.send()
    assert output is not None
    assert (drafts_of(output), output.batch.draft_ids) == ([5], [4, 5, 6, 7, 8])
    assert output.batch.query_lens == [6]
    assert desk.send() is None
    assert [event.new_token_ids for event in desk.answer()] == [(4,), (5,), (6,), (7,), (8,), (9,)]


def test_what_was_waited_for_in_vain_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(config={"prompt_lookup_min": 2})
    noted: list[int] = []
    monkeypatch.setattr(PromptLookup, "note", lambda _, num_right: noted.append(num_right))
    desk.add([1, 2, 3, 7, 1], [2, 9, 8, 7, 6, 5, 4, 3])
    desk.send()  # the prompt
    assert desk.send() is not None  # 7 1 was never followed by anything
    desk.answer()  # 2: 1 2 is known, 3 is expected where 9 is under way
    assert desk.send() is None
    desk.answer()
    output = desk.send()
    assert output is not None
    assert drafts_of(output) == []
    assert desk.scheduler.get_stats().num_drafts == 0
    desk.answer()
    desk.send()  # nothing was waited for
    assert noted == [0]


def test_after_a_guess_of_which_nothing_was_right_nobody_guesses_for_two_tokens() -> None:
    desk = Desk(config={"prompt_lookup_min": 2})
    desk.add([1, 2, 3, 7, 3, 9, 8, 1, 2], [3, 9, 8, 8, 8, 8, 8, 8])
    desk.send()
    desk.answer()
    output = desk.send()
    assert output is not None
    assert output.batch.draft_ids[0] == 7
    assert [event.new_token_ids for event in desk.answer()] == [(9,)]
    for _ in range(2):
        desk.send()  # though 3 9 was there before
    assert list(map(drafts_of, desk.sent[2:])) == [[], []]


def test_drafts_end_with_the_block_and_before_the_last_token_of_the_request() -> None:
    desk = Desk(block_size=4)
    desk.add([4] * 6, [4] * 9)
    desk.run()
    ends = [
        (output.batch.positions[0], output.batch.query_lens[0])
        for output in desk.sent
        if drafts_of(output)
    ]
    assert ends == [(6, 2), (8, 4), (12, 1)][: len(ends)]
    assert len(ends) == 2
    assert desk.text(1) == [4] * 9


def test_no_step_waits_where_the_next_row_fills_its_block() -> None:
    desk = Desk(block_size=4)
    desk.add([4] * 7, [4] * 9)
    desk.send()
    desk.send()
    assert [(output.batch.positions, drafts_of(output)) for output in desk.sent[1:]] == [([7], [])]


def test_a_draft_never_ends_a_text() -> None:
    desk = Desk(depth=1)
    desk.add([1, 2, 3, EOS, 1, 2], [3, EOS, 0, 0, 0, 0, 0])
    desk.run()
    assert all(EOS not in output.batch.draft_ids for output in desk.sent)
    assert desk.text(1) == [3]
    assert desk.events[-1].finish_reason is FinishReason.STOP


def test_few_rows_share_the_drafts_of_a_step_and_many_have_none() -> None:
    desk = Desk(depth=1)
    for _ in range(3):
        desk.add(SONG * 2, SONG)
    desk.send()
    desk.answer()
    output = desk.send()
    assert output is not None
    assert drafts_of(output) == [5, 0, 0]
    assert sum(output.batch.query_lens) == _MOST_ROWS
    crowd = Desk(depth=1)
    for _ in range(_MOST_ROWS):
        crowd.add(SONG * 2, SONG)
    crowd.run()
    assert crowd.scheduler.get_stats().num_drafts < len(SONG)  # of the last ones left, if any


@pytest.mark.parametrize("limit", ["max_batch_size", "max_total_tokens"])
def test_drafts_are_rows_and_tokens_within_the_limits_of_a_step(limit: str) -> None:
    desk = Desk(config={limit: 3})
    desk.add(SONG * 2, SONG)
    desk.run()
    assert max(sum(drafts_of(output)) for output in desk.sent) == 2


def test_who_waits_for_a_prompt_is_not_kept_waiting_by_drafts() -> None:
    desk = Desk()
    desk.add(SONG * 2, SONG * 2)
    desk.send()
    desk.answer()
    desk.add([5, 6, 7], [1])
    output = desk.send()
    assert output is not None
    assert drafts_of(output) == []
    assert output.prefill_request_ids == [2]


def test_the_rest_of_a_prompt_is_not_kept_waiting_by_drafts() -> None:
    desk = Desk(config={"max_prefill_tokens": 4})
    desk.add(SONG[:2] * 2, [*SONG[:2] * 3, 9])
    desk.send()
    desk.answer()
    desk.add([11, 12, 13, 14, 15, 16, 17, 18], [1])
    desk.send()
    desk.send()  # its second half, though 2 1 2 was there before
    assert [output.prefill_request_ids for output in desk.sent] == [[1], [2], [2]]
    assert desk.scheduler.get_stats().num_drafts == 0


def test_who_waits_for_a_slot_is_served_by_steps_that_do_not_wait() -> None:
    desk = Desk(config={"max_num_seqs": 1})
    desk.add(SONG * 2, SONG * 2)
    desk.add([5, 6, 7], [1])
    for _ in range(8):
        while len(desk.in_flight) < 2:
            assert desk.send() is not None
        desk.answer()
    assert desk.scheduler.get_stats().num_drafts == 0


def test_blocks_that_drafts_fill_are_found_and_their_tokens_counted() -> None:
    desk = Desk(caches=True)
    desk.add(SONG * 2, SONG * 4)
    for _ in range(4):
        assert desk.send() is not None
        desk.answer()
        table = desk.scheduler.get_memory_stats()
        text = len(SONG) * 2 + len(desk.text(1)) - 1
        assert table.internal_fragmentation == 1 - text / (16 * table.used_blocks)
    assert desk.scheduler.get_stats().num_kept_drafts > 16
    desk.run()
    desk.add(SONG * 5, [1])
    desk.run()
    assert desk.requests[2].cached_tokens == 32


def test_a_cancelled_request_gets_nothing_of_its_drafts() -> None:
    desk = Desk()
    desk.add(SONG * 2, SONG * 2)
    desk.send()
    desk.answer()
    output = desk.send()
    assert output is not None
    assert drafts_of(output) != []
    desk.scheduler.cancel(1)
    assert desk.answer() == []
    assert not desk.scheduler.has_pending_work()
    assert desk.scheduler.get_memory_stats().used_blocks == 0


def test_kept_drafts_have_the_log_probabilities_of_their_own() -> None:
    desk = Desk()
    desk.add([*SONG, 1, 2], [3, 4, 5, 6, 9], num_logprobs=0)
    desk.send()
    batch = desk.sent[0].batch
    first = {0: TokenLogprobs(-3.0)}
    desk.scheduler.commit(StepResult(batch.step_id, [3], sample_logprobs=first))
    output = desk.send()
    assert output is not None
    assert output.batch.draft_ids == [4, 5]
    events = desk.scheduler.commit(
        StepResult(
            output.batch.step_id,
            [6],
            kept_drafts=[2],
            sample_logprobs={0: TokenLogprobs(-6.0)},
            draft_logprobs={0: [TokenLogprobs(-4.0), TokenLogprobs(-5.0)]},
        )
    )
    assert [(e.new_token_ids, e.logprobs[0].logprob) for e in events] == [
        ((4,), -4.0),
        ((5,), -5.0),
        ((6,), -6.0),
    ]


@pytest.mark.parametrize("kept", [[8], [1, 0], [0, 0]])
def test_a_result_that_keeps_what_was_not_sent_is_refused(kept: list[int]) -> None:
    desk = Desk()
    desk.add([*SONG, 1, 2], SONG[2:] * 2)
    desk.send()
    desk.answer()
    output = desk.send()
    assert output is not None
    with pytest.raises(SchedulerError, match="keeps"):
        desk.scheduler.commit(StepResult(output.batch.step_id, [4], kept_drafts=kept))
    assert desk.answer()


@pytest.mark.parametrize(
    ("name", "value"),
    [("speculative_tokens", -1), ("grammar_drafts", -1), ("prompt_lookup_min", 0)],
)
def test_limits_of_drafts_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**{name: value})
