"""Proof that the tests of decode attention notice: barriers, tickets and indices are broken."""

from __future__ import annotations

import inspect

import pytest

from bench.gpu.cases.attention_decode import draw_case
from tests.kernels.cuda.broken_decode_attention import (
    FACTORIES,
    FLOAT32,
    FLOAT32_HALF,
    INT8,
    TENSOR,
    WIDE,
    WINDOW,
    break_source,
)
from tests.kernels.cuda.simulation import SYNCHRONISATION, simulate
from tests.simt import Divergence, OutOfBounds, Race

__all__ = ["break_source"]
pytestmark = pytest.mark.usefixtures("short_chunks")

# Where the warp's first tile is looked up, and where the one after the next.
FIRST_TILE = "if next_tile < end_tile:\n            block"
LATER_TILE = "if next_tile < end_tile:\n" + 24 * " "


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", [TENSOR, FLOAT32_HALF, INT8, WIDE], ids=lambda v: v.name)
def test_the_unbroken_source_passes(variant, break_source):
    for factory in FACTORIES:  # those that others call come first
        break_source(factory, f"def {factory}(", f"def {factory}(")
    case = draw_case(variant, (69,), num_kv_heads=1, splits=2)

    assert case.faults(simulate(case)) == []


def test_all_barriers_are_where_results_are_merged_or_queries_shared():
    counts = {
        factory: sum(
            line.strip() in SYNCHRONISATION
            for line in inspect.getsource(getattr(modules[0], factory)).splitlines()
        )
        for factory, modules in FACTORIES.items()
    }

    assert counts.pop("make_partial_functions") == 2
    assert counts.pop("make_merge_chunks") == 4
    assert counts.pop("_make_scarce") == 1
    for factory in ("make_tensor_decode", "make_float32_decode"):
        assert counts.pop(factory) == 1  # waits for the launch ahead
    assert not any(counts.values())


@pytest.mark.parametrize("behind", ["\n        for j in range(states):", "\n\n        first ="])
def test_a_deleted_barrier_is_a_race_in_every_order_of_threads(behind, break_source):
    break_source("make_partial_functions", "cuda.syncthreads()" + behind, "pass" + behind)

    for seed in range(3):
        with pytest.raises(Race, match="shared memory"):
            simulate(draw_case(TENSOR, (20,), num_kv_heads=1), seed=seed)


def test_queries_that_are_not_waited_for_are_a_race_in_every_order_of_threads(break_source):
    break_source("_make_scarce", "cuda.syncthreads()", "pass")

    for seed in range(3):
        with pytest.raises(Race, match="shared memory"):
            simulate(draw_case(WIDE, (20,), num_kv_heads=1), seed=seed)


MERGE_STEPS = [
    ("cuda.syncthreads()\n        if", "pass\n        if"),
    ("fence()\n            number", "pass\n            number"),
    ("last)\n            fence()", "last)\n            pass"),
    ("cuda.syncthreads()\n        return", "pass\n        return"),
    ("LOAD_FRESH_WORDS[width]", "STALE_WORDS[width]"),
    ("LOAD_FRESH_WORDS[1]", "STALE_WORDS[1]"),
]


@pytest.mark.wide
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("old", "new"), MERGE_STEPS)
def test_no_step_on_the_way_from_block_to_block_can_be_left_out(old, new, seed, break_source):
    break_source("make_merge_chunks", old, new)
    case = draw_case(FLOAT32_HALF, (130, 69), num_kv_heads=1, splits=3)

    with pytest.raises(Race):
        simulate(case, seed=seed)


@pytest.mark.wide
@pytest.mark.parametrize(
    "new", ["num_blocks", pytest.param("num_blocks + 1", marks=pytest.mark.slow)]
)
def test_tickets_that_are_not_drawn_to_the_last_are_not_zeros_again(new, break_source):
    break_source("make_merge_chunks", "last = int32(num_blocks - 1)", f"last = int32({new})")
    case = draw_case(FLOAT32_HALF, (130, 3), num_kv_heads=1, splits=3)

    assert case.errors(simulate(case))["tickets"] > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row * cuda.gridDim.x + unit, last", "unit, last"),
        ("last = int32(num_blocks - 1)", "last = int32(num_blocks - 2)"),
    ],
)
def test_a_ticket_of_another_row_or_a_count_too_small_is_noticed(old, new, break_source):
    break_source("make_merge_chunks", old, new)
    case = draw_case(FLOAT32_HALF, (130, 69), num_kv_heads=1, splits=3)

    try:
        outputs = simulate(case)
    except Race:
        return
    assert case.faults(outputs)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("variant", "factory", "old", "new", "fault"),
    [
        (FLOAT32, "make_float32_decode", "+ first_token //", "+ 9 + first_token //", OutOfBounds),
        (FLOAT32, "make_float32_decode", "place = block *", "place = block * 2 *", OutOfBounds),
        (FLOAT32, "make_partial_functions", "unit % parts", "0", Race),
        (TENSOR, "make_partial_functions", "head < heads and head_of_group < group and", "", Race),
        (TENSOR, "make_tensor_decode", FIRST_TILE, "if True:\n            block", OutOfBounds),
        (TENSOR, "make_tensor_decode", LATER_TILE, "if True:\n" + 24 * " ", OutOfBounds),
    ],
    ids=["table", "block", "part", "head past the group", "no tile", "no next tile"],
)  # fmt: skip
def test_an_index_that_is_wrong_is_a_fault(variant, factory, old, new, fault, break_source):
    break_source(factory, old, new)

    with pytest.raises(fault):
        simulate(draw_case(variant, (0, 69), num_kv_heads=2 if fault is Race else 1))


def test_a_shuffle_that_some_lanes_skip_is_a_fault(break_source):
    shuffle = "score += cuda.shfl_xor_sync("
    break_source("make_float32_decode", shuffle, "if lane > 0: " + shuffle)

    with pytest.raises(Divergence):
        simulate(draw_case(FLOAT32, (5,), num_kv_heads=1))


@pytest.mark.parametrize(
    ("factory", "old", "new"),
    [
        ("make_cut_row", "seq_len - window", "seq_len - window - TILE_TOKENS"),
        ("make_cut_row", "seq_len - window", "0"),
        # More chunks to merge than there are.
        ("make_tensor_decode", "end_tile - first_tile +", "end_tile +"),
    ],
)
def test_what_lies_before_a_window_is_out_of_bounds(factory, old, new, break_source):
    break_source(factory, old, new)

    with pytest.raises(OutOfBounds):
        simulate(draw_case(WINDOW, (150,), num_kv_heads=1, splits=2, window=100))
