"""A start names the tokens and blocks that another slot has, instead of bringing them."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from compute_plane.errors import InvalidBatch
from compute_plane.executor.step import RowFailureReason, SlotPrefix, SlotStart, TableCopy
from tests.compute_plane.executor.driven_device import TEXT, Driven, decode, prompts
from tests.compute_plane.executor.slot_batches import GREEDY, LIMITS, Plane, alone, column, step
from tests.compute_plane.executor.slot_batches import start as whole


def start(slot: int, prefix: SlotPrefix, tokens: bytes, blocks: list[int]) -> SlotStart:
    """A start of a prompt that begins as another slot does."""
    num_tokens = prefix.num_tokens + len(tokens)
    return SlotStart(slot, column(list(tokens)), num_tokens, column(blocks), GREEDY, prefix)


@pytest.fixture
def plane() -> Plane:
    """Slot 0 has "shared text" in blocks 0, 1 and 2, and a token more."""
    plane = Plane()
    plane.tokens(step([(0, 0, 11)], starts=[whole(0, b"shared text", [0, 1, 2])]))
    return plane


def test_a_slot_goes_on_from_the_first_tokens_and_blocks_of_another(plane: Plane):
    tokens = plane.tokens(step([(1, 4, 5)], starts=[start(1, SlotPrefix(0, 7, 1), b"XY", [8, 9])]))
    assert tokens == alone(b"shared XY", 1)
    assert plane.batches[-1].block_tables[:, :3].tolist() == [[0, 8, 9]]
    assert plane.tokens(step([(0, 11, 1)])) == alone(b"shared text", 2)[1:]


def test_it_may_have_all_of_them_and_none_of_its_own(plane: Plane):
    starts = [start(1, SlotPrefix(0, 11, 2), b"", [8])]
    assert plane.tokens(step([(1, 8, 3)], starts=starts)) == alone(b"shared text", 1)


def test_the_token_that_the_plane_sampled_is_replaced_by_starting_a_slot_with_itself(plane: Plane):
    tokens = plane.tokens(step([(0, 11, 1)], starts=[start(0, SlotPrefix(0, 11, 3), b"!", [])]))
    assert tokens == alone(b"shared text!", 1)
    # Again, with what it samples after that: the old lines of a slot are used by others meanwhile.
    plane.tokens(step(starts=[whole(slot, b"other", [20]) for slot in (1, 2, 3)]))
    starts = [start(0, SlotPrefix(0, 12, 3), b"?", [13])]
    assert plane.tokens(step([(0, 12, 1)], starts=starts)) == alone(b"shared text!?", 1)


def test_starts_are_taken_in_order_and_each_may_name_those_before_it(plane: Plane):
    starts = [
        start(1, SlotPrefix(0, 4, 1), b"X", [8]),
        start(0, SlotPrefix(1, 5, 1), b"Y", [9]),
        start(2, SlotPrefix(0, 6, 1), b"Z", [10]),
    ]
    tokens = plane.tokens(step([(1, 4, 1), (0, 4, 2), (2, 4, 3)], starts=starts))
    expected = [alone(text, 1)[0] for text in (b"sharX", b"sharXY", b"sharXYZ")]
    assert tokens == expected


def test_a_slot_that_the_batch_releases_can_be_named_and_none_that_one_before_released(
    plane: Plane,
):
    first = start(1, SlotPrefix(0, 8, 2), b"!", [9])
    batch = step([(1, 8, 1)], released=[0], starts=[first, whole(0, b"new", [11])])
    assert plane.tokens(batch) == alone(b"shared t!", 1)
    assert plane.tokens(step([(0, 0, 3)])) == alone(b"new", 1)
    plane.tokens(step(released=[0, 1]))
    with pytest.raises(InvalidBatch) as refused:
        plane.run(step(starts=[start(2, SlotPrefix(1, 1, 0), b"!", [9])]))
    assert refused.value.field == "starts[0].prefix.slot"


def test_its_table_is_the_one_that_the_copies_of_the_batch_have_left(plane: Plane):
    batch = step(
        [(0, 11, 1)],
        copies=[TableCopy(0, 2, 2, 30)],
        starts=[start(0, SlotPrefix(0, 11, 3), b"!", [])],
    )
    assert plane.tokens(batch) == alone(b"shared text!", 1)
    assert plane.batches[-1].block_tables[:, :3].tolist() == [[0, 1, 30]]


def test_what_begins_as_a_poisoned_slot_is_poisoned(plane: Plane):
    plane.run(step([(0, 11, 1)]), failed_rows={0: "broken"})
    starts = [start(1, SlotPrefix(0, 11, 3), b"!", []), whole(2, b"sound", [20, 21])]
    result = plane.run(step([(1, 11, 1), (2, 0, 5)], starts=starts))
    assert [(f.row, f.reason) for f in result.row_failures] == [(0, RowFailureReason.POISONED)]
    assert result.sampled_token_ids.tolist()[1:] == alone(b"sound", 1)
    assert plane.tokens(step([(1, 0, 2)], starts=[whole(1, b"ok", [9])])) == alone(b"ok", 1)


@pytest.mark.parametrize(
    ("prefix", "tokens", "blocks", "field"),
    [
        (SlotPrefix(0, 13, 3), b"!", [], "starts[0].prefix.num_tokens"),
        (SlotPrefix(0, 11, 4), b"!", [], "starts[0].prefix.num_blocks"),
        (SlotPrefix(3, 0, 0), b"!", [9], "starts[0].prefix.slot"),
        (SlotPrefix(LIMITS.max_slots, 1, 0), b"!", [9], "starts[0].prefix.slot"),
        (SlotPrefix(0, 0, 0), b"", [9], "starts[0].token_ids"),
        (SlotPrefix(0, 1 << 32, 0), b"!", [9], "starts[0].token_ids"),
        (SlotPrefix(0, 1, 3), b"!", [9] * 8, "starts[0].block_ids"),
        (SlotPrefix(0, 1, 1 << 32), b"!", [], "starts[0].block_ids"),
    ],
)
def test_a_prefix_that_is_not_there_is_refused_and_leaves_no_trace(
    plane: Plane, prefix: SlotPrefix, tokens: bytes, blocks: list[int], field: str
):
    before = copy.deepcopy(plane.slots._numbers)
    num_free = len(plane.slots._memory.free_lines)
    with pytest.raises(InvalidBatch) as refused:
        plane.run(step(starts=[start(1, prefix, tokens, blocks)]))
    assert refused.value.field == field
    for name in before.__slots__:
        now = getattr(plane.slots._numbers, name)
        np.testing.assert_array_equal(now, getattr(before, name))
    assert len(plane.slots._memory.free_lines) == num_free
    assert plane.tokens(step([(0, 11, 1)])) == alone(b"shared text", 2)[1:]


def test_who_is_in_the_step_under_way_is_named_when_that_is_over(driven: Driven):
    """Its newest token is not known before, and not whether it is sound."""
    driven.begin(0, 1)
    driven.send(decode(4, 0))
    first = driven.launched()
    num_tokens = len(TEXT) + 2
    driven.send(step([(2, 4, 3)], starts=[start(2, SlotPrefix(0, num_tokens, 1), b"!", [50])]))
    first.run()
    text = TEXT + bytes([*alone(TEXT, 1), *driven.tokens()])
    second = driven.launched()
    assert second.batch.input_tokens.tolist() == [*text[4:], ord("!")]
    # Of one that is not in it all is known.
    driven.send(step([(3, 4, 1)], starts=[start(3, SlotPrefix(1, 4, 1), b"!", [51])]))
    third = driven.launched()
    second.run()
    third.run()
    assert [driven.tokens(), driven.tokens()] == [alone(text + b"!", 1), alone(TEXT + b"!", 1)]


def test_what_begins_as_a_slot_that_fails_under_way_is_poisoned(driven: Driven):
    driven.begin(0)
    driven.send(decode(4, 0))
    first = driven.launched()
    driven.send(step([(1, 4, 1)], starts=[start(1, SlotPrefix(0, 4, 1), b"!", [50])]))
    first.failed_rows[0] = "broken"
    first.run()
    assert driven.reply().result is not None
    result = driven.reply().result
    assert result is not None
    assert [f.reason for f in result.row_failures] == [RowFailureReason.POISONED]


def test_prompts_have_the_lines_that_are_read(driven: Driven):
    """As many starts as there are lines for: each names one whose line may not be given away."""
    driven.begin(*range(4))
    starts = [start(slot, SlotPrefix((slot + 1) % 4, 4, 1), b"!", [40 + slot]) for slot in range(4)]
    for _ in range(6):
        driven.send(step([(slot, 4, 1) for slot in range(4)], starts=starts))
        driven.launched().run()
        assert driven.tokens() == alone(TEXT + b"!", 1) * 4
    driven.send(prompts(5))
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 1)
