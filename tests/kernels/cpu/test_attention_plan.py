"""Which contexts are cut into segments, and that every segment of every row is computed once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.attention_items import attention_items, tokens_per_item
from kernels.cpu.attention_plan import (
    USUAL_SLOTS,
    AttentionPlan,
    AttentionShape,
    LastingPlan,
    num_slots,
    plan_attention,
)
from kernels.interface import Int32Array

GROUP = 3
MANY_HEADS = 64
"""So many that no context is cut for threads."""


def plan_of(
    positions: list[int], tables: Int32Array | None = None, *, threads: int = 1,
    heads: int = MANY_HEADS, slots: int = USUAL_SLOTS,
) -> AttentionPlan:  # fmt: skip
    """Return the plan of rows of one token, by default in blocks of their own."""
    at = np.array(positions, np.int32)
    if tables is None:
        width = int(at.max()) // 16 + 1
        tables = np.arange(len(at) * width, dtype=np.int32).reshape(len(at), width)
    items = attention_items(np.ones(len(at), np.int32), GROUP)
    return plan_attention(items, at, tables, AttentionShape(GROUP, 16, heads, threads, slots))


def items_of(plan: AttentionPlan) -> list[tuple[list[int], int, int]]:
    """Return the tokens, row of the tables and segment of each item."""
    return [
        (plan.tokens[first : first + count].tolist(), row, segment)
        for first, count, row, segment in plan.items.tolist()
    ]


def test_only_long_contexts_of_small_steps_are_cut_for_threads() -> None:
    whole = [([0], 0, 0), ([1], 1, 0)]
    assert items_of(plan_of([3000, 10], heads=3, threads=1)) == whole
    plan = plan_of([3000, 10], heads=3, threads=2)
    assert items_of(plan) == [([0], 0, 1), ([0], 0, 2), ([0], 0, 3), ([1], 1, 0)]
    assert (plan.merges.tolist(), int(plan.slots[0])) == ([[0, 3]], 0)
    assert items_of(plan_of([900, 10], heads=3, threads=2)) == whole


def test_threads_share_contexts_of_any_length_the_longest_first() -> None:
    def cut(*lengths: int, slots: int = 256) -> list[int]:
        """How many segments become items of each context."""
        at = [length - 1 for length in lengths]
        plan = plan_of(at, heads=8, threads=64, slots=slots)
        assert plan.merges[:, 1].sum() <= slots
        counts: list[int] = np.bincount(plan.items[:, 2]).tolist()
        assert plan.merges[:, 1].tolist() == [count for count in counts if count > 1]
        return counts

    assert cut(1 << 18) == [256]
    assert cut((1 << 18) + 1) == [1]
    assert cut((1 << 18) + 1, slots=num_slots(1 << 20, 16, 720)) == [257]
    assert cut(1 << 21, 1 << 21, slots=num_slots(1 << 21, 16, 720)) == [2048, 2048]
    # From the first one on that there is no room for they are left whole, and not all of them.
    assert cut(90_000, 131_073, 90_000, 500, 30_000) == [88, 129, 1, 1, 1]
    assert num_slots(4096, 16, 720) == USUAL_SLOTS
    assert num_slots(4096, 16, 128 * 528) == (1 << 27) // (4 * 128 * 528)
    assert num_slots(4096, 16, 1 << 20) == 256


def tables_with(common: list[int], width: int) -> Int32Array:
    """Return tables of rows which each have so many of the first row's blocks."""
    tables = np.arange(len(common) * width, dtype=np.int32).reshape(len(common), width)
    for row, count in enumerate(common):
        tables[row, :count] = tables[0, :count]
    return tables


def test_segments_in_the_same_blocks_are_one_item() -> None:
    plan = plan_of([2100, 3000, 2050, 500], tables_with([0, 128, 64, 31], 200))
    assert items_of(plan) == [
        ([2, 0, 1], 2, 1),  # in the order of their positions
        ([0, 1], 0, 2),
        ([0], 0, 3),
        ([1], 1, 3),
        ([2], 2, 2),
        ([2], 2, 3),
        ([3], 3, 0),
    ]
    assert plan.merges.tolist() == [[0, 3], [1, 3], [2, 3]]
    assert plan.slots[:3].tolist() == [0, 3, 6]


def test_a_segment_that_differs_in_any_block_is_nobody_elses() -> None:
    tables = tables_with([0, 64], 80)
    assert len(plan_of([1100, 1100], tables).merges) == 2
    tables[1, 5] = 159
    assert items_of(plan_of([1100, 1100], tables)) == [([0], 0, 0), ([1], 1, 0)]


def test_a_segment_that_a_row_does_not_see_whole_is_its_own() -> None:
    tables = tables_with([0, 64, 64], 80)
    assert len(plan_of([1022, 1100, 1022], tables).merges) == 0
    assert plan_of([1100, 1100, 1023], tables).merges.tolist() == [[0, 2], [1, 2], [2, 1]]


def test_many_rows_are_items_of_the_usual_size() -> None:
    plan = plan_of([1100] * 40, tables_with([0] + [64] * 39, 80))
    sizes = [len(tokens) for tokens, _, segment in items_of(plan) if segment == 1]
    assert sizes == [13, 13, 14]
    assert max(sizes) <= tokens_per_item(GROUP)


def test_rows_beyond_the_room_for_partials_keep_their_contexts_whole() -> None:
    plan = plan_of([1100] * 40, tables_with([0] + [64] * 39, 80), slots=21)
    assert plan.merges.tolist() == [[row, 2] for row in range(10)]
    assert [row for _, row, segment in items_of(plan) if segment == 0] == list(range(10, 40))


def test_rows_that_share_nothing_take_no_room_from_those_that_do() -> None:
    tables = tables_with([0, 0, 0, 0, 64, 64], 80)
    tables[4:, :64] = tables[5, :64] = np.arange(5 * 80, 5 * 80 + 64)
    plan = plan_of([1100] * 6, tables, slots=4)
    assert plan.merges.tolist() == [[4, 2], [5, 2]]


def test_where_an_item_has_one_token_nothing_is_cut() -> None:
    at = np.array([1100, 1100], np.int32)
    items = attention_items(np.ones(2, np.int32), 25)
    plan = plan_attention(items, at, tables_with([0, 64], 80), AttentionShape(25, 16, 64, 1))
    np.testing.assert_array_equal(plan.items, items)


def test_tokens_of_prompts_are_left_as_they_are() -> None:
    query_lens = np.array([1, 40, 1], np.int32)
    items = attention_items(query_lens, GROUP)
    positions = np.array([1100, *range(1100, 1140), 1200], np.int32)
    plan = plan_attention(
        items, positions, tables_with([0, 64, 64], 80), AttentionShape(GROUP, 16, MANY_HEADS, 2)
    )
    found = items_of(plan)
    assert found[0] == ([0, 41], 0, 1)
    assert [item for item in found if item[1] == 1] == [
        (list(range(first, first + count)), row, 0) for first, count, row, _ in items[1:-1].tolist()
    ]


@st.composite
def prefix_trees(draw: st.DrawFn) -> tuple[list[int], Int32Array, int, int, int]:
    """Return positions, tables, block size, threads and slots of rows that part anywhere."""
    block_size = draw(st.sampled_from([8, 16, 24, 48, 64]))
    segment = AttentionShape(1, block_size, 1, 1).least_position
    rows = draw(st.integers(1, 12))
    positions = draw(st.lists(st.integers(0, 4 * segment), min_size=rows, max_size=rows))
    width = 4 * segment // block_size + 2
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    for row in range(1, rows):
        source = draw(st.integers(0, row - 1))
        count = draw(st.integers(0, width - 1))
        tables[row, :count] = tables[source, :count]
    return positions, tables, block_size, draw(st.integers(1, 3)), draw(st.integers(1, 40))


@given(tree=prefix_trees(), heads=st.sampled_from([1, MANY_HEADS]))
def test_every_segment_of_every_row_is_computed_once_in_the_blocks_it_lies_in(
    tree: tuple[list[int], Int32Array, int, int, int], heads: int
) -> None:
    positions, tables, block_size, threads, slots = tree
    at = np.array(positions, np.int32)
    shape = AttentionShape(GROUP, block_size, heads, threads, slots)
    plan = plan_attention(attention_items(np.ones(len(at), np.int32), GROUP), at, tables, shape)
    done: dict[int, list[int]] = {row: [] for row in range(len(at))}
    for tokens, row, segment in items_of(plan):
        assert 0 < len(tokens) <= tokens_per_item(GROUP)
        assert np.all(np.diff(at[tokens]) >= 0)
        if segment == 0:
            assert tokens == [row]
        for token in tokens:
            done[token].append(segment)
            if len(tokens) > 1:
                assert shape.whole_segments(at[[token]])[0] >= segment
                blocks = shape.blocks_of(segment - 1)
                np.testing.assert_array_equal(tables[token, blocks], tables[row, blocks])
    counts = dict(plan.merges.tolist())
    assert sum(counts.values()) <= slots
    every = [
        slot
        for token, n in counts.items()
        for slot in range(plan.slots[token], plan.slots[token] + n)
    ]
    assert sorted(every) == list(range(len(every)))
    for row, segments in done.items():
        wanted = list(range(1, counts[row] + 1)) if row in counts else [0]
        assert sorted(segments) == wanted
        if row in counts:
            assert counts[row] == shape.num_segments(at[[row]])[0]


class TestAPlanThatLasts:
    def lasting(self, rows: int) -> LastingPlan:
        return LastingPlan(np.ones(rows, np.int32), AttentionShape(GROUP, 16, MANY_HEADS, 1))

    def test_is_the_same_object_until_a_row_ends_a_segment(self) -> None:
        lasting, tables = self.lasting(2), tables_with([0, 64], 130)
        positions = np.array([1090, 2040], np.int32)
        first = lasting.plan(positions, tables)
        assert len(first.merges) == 2
        tables = tables.copy()
        tables[:, 128:] += 1000
        tables[0, 70:] += 1000  # what a shorter row takes, or has not taken yet
        for _ in range(6):
            positions = positions + np.int32(1)
            assert lasting.plan(positions, tables) is first
        later = lasting.plan(positions + np.int32(2), tables)
        assert later.merges.tolist() == [[0, 2], [1, 3]]

    def test_is_made_anew_where_blocks_are_others(self) -> None:
        lasting, tables = self.lasting(2), tables_with([0, 64], 80)
        positions = np.array([1090, 1070], np.int32)
        assert len(lasting.plan(positions, tables).merges) == 2
        tables[1, 3] = 159
        assert len(lasting.plan(positions, tables).merges) == 0

    def test_looks_at_tables_that_nobody_can_write_once(self) -> None:
        lasting, tables = self.lasting(2), tables_with([0, 64], 80)
        positions = np.array([1090, 1070], np.int32)
        tables.flags.writeable = False
        first = lasting.plan(positions, tables)
        assert lasting.plan(positions, tables) is first
        others = tables.copy()
        others[1, 3] = 159
        others.flags.writeable = False
        assert len(lasting.plan(positions, others).merges) == 0

    def test_is_made_anew_where_positions_change_their_order(self) -> None:
        lasting, tables = self.lasting(2), tables_with([0, 64], 80)
        for first, second in ((1070, 1090), (1092, 1071)):
            plan = lasting.plan(np.array([first, second], np.int32), tables)
            [shared] = [tokens for tokens, _, _ in items_of(plan) if len(tokens) > 1]
            assert shared == ([0, 1] if first < second else [1, 0])

    @pytest.mark.parametrize("position", [0, 1022, 1023])
    def test_is_whole_where_no_context_has_two_segments(self, position: int) -> None:
        lasting, tables = self.lasting(2), tables_with([0, 64], 80)
        plan = lasting.plan(np.array([5, position], np.int32), tables)
        assert plan is lasting.plan(np.array([6, position], np.int32), tables)
        assert items_of(plan) == [([0], 0, 0), ([1], 1, 0)]
