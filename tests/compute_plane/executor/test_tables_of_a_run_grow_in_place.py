"""Block tables of steps: gathered row by row, grown in place, looked at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.executor import block_tables
from compute_plane.executor.block_tables import (
    SPARE_ENTRIES,
    are_blocks,
    gather_tables,
    rectangle_width,
)
from compute_plane.executor.decode_checks import DecodeChecks
from compute_plane.executor.interface import ExecutionBatch
from compute_plane.executor.token_layout import PoolShape
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, start, step
from tests.golden.batch_driver import int32

SHAPE = PoolShape(num_blocks=64, block_size=4, vocab_size=9)
LONG = replace(LIMITS, context_length=2000, num_blocks=1000)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tables, "FEW_ENTRIES", 0)
    monkeypatch.setattr(block_tables, "CHEAP_ENTRIES", 0)


def a_run(plane: Plane, lengths: list[int], count: int) -> None:
    """Rows that begin together and decode, with the blocks of their slot's hundred."""
    size = plane.slots.limits.block_size
    held = [-(-length // size) for length in lengths]
    starts = [
        start(slot, b"x" * length, range(100 * slot, 100 * slot + held[slot]))
        for slot, length in enumerate(lengths)
    ]
    rows = [(slot, length - 1, 1) for slot, length in enumerate(lengths)]
    plane.tokens(step(rows, starts=starts))
    for n in range(count):
        new: list[list[int]] = [[] for _ in lengths]
        for slot, length in enumerate(lengths):
            if length + n == held[slot] * size:
                new[slot] = [100 * slot + held[slot]]
                held[slot] += 1
        rows = [(slot, length + n, 1) for slot, length in enumerate(lengths)]
        plane.tokens(step(rows, new_blocks=new if any(new) else []))


def test_steps_of_a_run_share_one_array_until_it_is_full() -> None:
    plane = Plane(LONG)
    size = LONG.block_size
    count = (SPARE_ENTRIES + 3) * size
    a_run(plane, [4, 9], count)
    arrays = [batch.block_tables for batch in plane.batches[1:]]  # the first one is of prompts
    kinds = {id(array): array for array in arrays}
    assert len(kinds) == 2
    assert arrays[0] is arrays[SPARE_ENTRIES * size - size]
    assert all(not array.flags.writeable for array in arrays)
    for batch in plane.batches:  # all of them, once the last one has been made
        for row, length in enumerate(batch.seq_lens.tolist()):
            used = batch.block_tables[row, : -(-length // size)]
            assert used.tolist() == [100 * row + place for place in range(len(used))]


def test_a_step_under_way_keeps_the_tables_that_it_was_given() -> None:
    plane = Plane(LONG)
    a_run(plane, [4, 6], 1)
    batch = plane.batches[-1]
    before = batch.block_tables[:, :2].copy()
    plane.tokens(step([(0, 5, 1), (1, 7, 1)]))
    plane.tokens(step([(0, 6, 1), (1, 8, 1)], new_blocks=[[], [102]]))
    assert plane.batches[-1].block_tables is batch.block_tables
    assert batch.block_tables[1, 2] == 102
    assert batch.block_tables[:, :2].tolist() == before.tolist()


def test_rows_of_another_order_get_an_array_of_their_own() -> None:
    plane = Plane(LONG)
    a_run(plane, [4, 6], 1)
    plane.tokens(step([(1, 7, 1), (0, 5, 1)]))
    first, second = plane.batches[-2:]
    assert second.block_tables is not first.block_tables
    assert second.block_tables[:, :2].tolist() == [[100, 101], [0, 1]]


def test_blocks_are_held_that_rows_of_a_run_use_and_no_others() -> None:
    plane = Plane(LONG)
    starts = [
        start(0, b"prompt", [1, 2, 3]),
        start(1, b"two", [10]),
        start(2, b"x" * 38, range(50, 80)),
    ]
    plane.tokens(step([(0, 0, 6), (1, 0, 3), (2, 0, 38)], starts=starts))
    plane.tokens(step([(0, 6, 1), (1, 3, 1), (2, 38, 1)]))
    run = plane.slots._run
    assert run is not None
    for block, is_free in [(2, False), (3, True), (10, False), (59, False), (60, True), (11, True)]:
        rows = step([(0, 7, 1), (1, 4, 1), (2, 39, 1)], new_blocks=[[], [block], []])
        assert run.is_continued_by(rows, plane.slots._numbers) == is_free


@pytest.mark.parametrize("used", [[1], [5, 5], [2, 40], [2, 3, 40], [40, 2, 2, 2, 39, 1, 9]])
def test_gathered_tables_have_what_rows_use(used: list[int]) -> None:
    tables = np.arange(400, dtype=np.int32).reshape(8, 50)
    lines = np.array([6, 1, 3, 7, 0, 2, 5])[: len(used)]
    found = gather_tables(tables, lines, np.array(used))
    assert found.shape == (len(used), min(max(used) + SPARE_ENTRIES, 50))
    for row, count in enumerate(used):
        assert found[row, :count].tolist() == tables[lines[row], :count].tolist()


@pytest.mark.parametrize(
    ("used", "width"),
    [([7], 7), ([2, 40], 40), ([2, 3, 3, 40], 3), ([9, 9, 9, 9, 9, 9], 9), ([1, 2, 3, 4, 5, 6], 4)],
)
def test_no_rectangle_costs_less(used: list[int], width: int) -> None:
    def cost(width: int) -> int:
        return len(used) * width + 3 * sum(max(count - width, 0) for count in used)

    assert rectangle_width(np.array(used)) == width
    assert cost(width) == min(cost(other) for other in range(max(used) + 1))


def test_only_entries_that_rows_use_must_be_blocks() -> None:
    tables = int32([[1, 64, -1], [5, 63, 64]])
    assert are_blocks(tables, np.array([1, 2]), 64)
    assert not are_blocks(tables, np.array([2, 2]), 64)
    assert not are_blocks(tables, np.array([1, 3]), 64)
    assert not are_blocks(tables, np.array([3, 1]), 64)


def decode_batch(tables: np.ndarray, positions: list[int]) -> ExecutionBatch:
    ones = np.ones(len(positions), dtype=np.int32)
    at = int32(positions)
    return ExecutionBatch(
        input_tokens=ones,
        positions=at,
        seq_lens=at + 1,
        block_tables=tables,
        is_prefill=np.zeros(len(ones), dtype=np.bool_),
        prompt_lens=ones,
        query_lens=ones,
        sampled_rows=int32(range(len(ones))),
        sampling=[None] * len(ones),  # type: ignore[list-item]
    )


def shared(entries: list[list[int]]) -> np.ndarray:
    tables = int32(entries)
    tables.flags.writeable = False
    return tables


@pytest.mark.parametrize("bad", [64, -1])
@pytest.mark.parametrize(
    "steps",
    [
        [([3, 1], True), ([4, 2], True), ([5, 7], True), ([6, 8], False), ([6, 4], True)],
        [([3, 1], True), ([3, 8], False), ([4, 4], True)],
        [([7, 7], True), ([7, 8], False), ([7, 8], False), ([7, 7], True)],
        [([7, 7], True), ([3, 4], True), ([8, 3], True), ([9, 8], False), ([9, 9], False)],
        [([3, 11], False), ([3, 7], True)],
        [([3, 3], True), ([3, 12], False)],
        [([3, 7], True), ([4, 12], False)],
    ],
)
def test_a_block_that_there_is_not_is_found_in_the_step_that_uses_it(
    steps: list[tuple[list[int], bool]], bad: int
) -> None:
    """In the third entry of the second row."""
    checks = DecodeChecks(SHAPE, 40, None, 8)
    tables = shared([[1, 2, 3, 4], [5, 6, bad, 8]])
    for positions, is_sound in steps:
        assert (checks.kv_slots(decode_batch(tables, positions)) is not None) == is_sound


def test_tables_that_can_be_written_are_looked_at_in_every_step() -> None:
    checks = DecodeChecks(SHAPE, 40, None, 8)
    tables = int32([[1, 2, 3], [5, 6, 7]])
    assert checks.kv_slots(decode_batch(tables, [9, 9])) is not None
    tables[0, 0] = 64
    assert checks.kv_slots(decode_batch(tables, [9, 9])) is None


def test_other_tables_are_looked_at_though_the_last_ones_were_sound() -> None:
    checks = DecodeChecks(SHAPE, 40, None, 8)
    assert checks.kv_slots(decode_batch(shared([[1, 2], [3, 4]]), [6, 6])) is not None
    assert checks.kv_slots(decode_batch(shared([[99, 2], [3, 4]]), [6, 6])) is None
    assert checks.kv_slots(decode_batch(shared([[99, 2, 1], [3, 4, 5]]), [7, 7])) is None
