"""Proof that the simulated tests notice: the kernels are broken in one place after another."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from bench.gpu.cases.attention_decode import draw_case
from kernels.cuda import (
    attention_chunks,
    attention_decode,
    attention_decode_float32,
    attention_decode_masks,
    attention_decode_pool,
    attention_decode_room,
    attention_decode_tensor,
    attention_merge,
    attention_partials,
)
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.instructions import vectors
from tests.kernels.cuda.simulation import SYNCHRONISATION, simulate
from tests.simt import Divergence, OutOfBounds, Race

TENSOR = DecodeVariant("bfloat16", 64, 3, 16)
NARROW_STRIP = DecodeVariant("float16", 96, 1, 16)
FLOAT32 = DecodeVariant("float32", 64, 5, 16)  # two parts, of three heads and of two
FLOAT32_HALF = DecodeVariant("float32", 64, 2, 16)
INT8 = DecodeVariant("bfloat16", 64, 3, 16, "int8")
FLOAT8 = DecodeVariant("float16", 96, 1, 16, "float8")
TWO_SLOTS = DecodeVariant("bfloat16", 64, 16, 32, "int8")
WIDE = DecodeVariant("bfloat16", 256, 3, 16)
WIDE_FLOAT32 = DecodeVariant("float32", 256, 2, 16)
WINDOW = DecodeVariant("bfloat16", 64, 3, 16, None, True)
WINDOW_INT8 = DecodeVariant("bfloat16", 64, 3, 16, "int8", True)
WINDOW_FLOAT32 = DecodeVariant("float32", 64, 2, 16, None, True)

# Where the warp's first tile is looked up, and where the one after the next.
FIRST_TILE = "if next_tile < end_tile:\n            block"
LATER_TILE = "if next_tile < end_tile:\n" + 24 * " "

# What follows lines of the loop where the next tile is read.
IF, LOAD = "\n" + 16 * " " + "if", "\n" + 20 * " " + "load"

# A factory → the module it is in, and those that call it.
FACTORIES: dict[str, tuple[ModuleType, ...]] = {
    "make_cut_row": (attention_chunks, attention_decode_tensor, attention_decode_float32),
    "make_tensor_decode": (attention_decode_tensor, attention_decode),
    "make_float32_decode": (attention_decode_float32, attention_decode),
    "make_decode_masks": (attention_decode_masks, attention_decode_tensor),
    "_make_load_values": (attention_decode_pool, attention_decode_pool),
    "_make_16_bits": (attention_decode_pool, attention_decode_pool),
    "_make_8_bits": (attention_decode_pool, attention_decode_pool),
    "_make_ample": (attention_decode_room, attention_decode_room),
    "_make_scarce": (attention_decode_room, attention_decode_room),
    "make_decode_room": (attention_decode_room, attention_decode_tensor),
    "make_merge_chunks": (attention_merge, attention_decode_tensor, attention_decode_float32),
    "make_partial_functions": (
        attention_partials, attention_decode_tensor, attention_decode_float32,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Chunks of 64 tokens: each sharer has one tile of a chunk."""
    for name in ("CHUNK_TILES", "LEAST_CHUNK_TILES"):
        monkeypatch.setattr(attention_chunks, name, 4)


@pytest.fixture
def break_source(monkeypatch):
    """Replace a piece of a factory's source, which must be there once."""

    def replace(factory: str, old: str, new: str) -> None:
        module, *users = FACTORIES[factory]
        text = inspect.getsource(getattr(module, factory))
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the source"
        names = dict(vars(module)) | {"STALE_WORDS": vectors.LOAD_WORDS}
        exec(compile(text.replace(old, new), inspect.getfile(module), "exec"), names)
        for user in users:
            monkeypatch.setattr(user, factory, names[factory])

    return replace


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


BREAKAGES = [
    # Values behind the row's end are NaN, and so are their scores.
    (TENSOR, 3, 1, "_make_16_bits", "values[4 * s + j, word] = uint32(0)", "pass"),
    (TENSOR, 16, 1, "make_tensor_decode", "new_peak, 4 << s", "new_peak, 2 << s"),
    (TENSOR, 16, 1, "_make_16_bits", "8 * half * head_size", "half * head_size"),
    (TENSOR, 133, 2, "make_tensor_decode", "(splits - 1) * chunk", "0 * chunk"),
    (INT8, 16, 1, "make_tensor_decode", "unit * key_scales[half] if", "unit if"),
    (INT8, 16, 1, "_make_8_bits", "low, high, UPPER_HALVES", "low, high, LOWER_HALVES"),
    (TWO_SLOTS, 133, 1, "make_tensor_decode", "% block_size" + IF, "% 1" + IF),
    (FLOAT32_HALF, 3, 1, "make_float32_decode", "and t * tokens_of_read < num_valid", ""),
    (TENSOR, 69, 2, "make_merge_chunks", "peak[slot] = top", "pass"),
    (WIDE, 16, 1, "_make_scarce", "first_head, first, of_warp", "first_head, 0, of_warp"),
    (WIDE_FLOAT32, 3, 1, "make_float32_decode", "element += i % vectors * READ_DIMS", "pass"),
]  # fmt: skip
MORE_BREAKAGES = [
    (TENSOR, 3, 1, "make_decode_masks", "scores[n, 2 * half] = MINUS_INFINITY", "pass"),
    (TENSOR, 20, 1, "make_partial_functions", "mass[j] * peak[j]", "mass[j]"),
    (INT8, 3, 1, "make_decode_masks", "value_factors[half] = float32(0)", "pass"),
    (FLOAT8, 16, 1, "_make_load_values", "narrower = 4 *", "narrower = 8 *"),
    (TENSOR, 3, 1, "make_decode_masks", "scores[n, 2 * half + 1] = MINUS_INFINITY", "pass"),
    (TENSOR, 16, 1, "make_tensor_decode", "a, (weights[n, 0], w", "a, (weights[n, 1], w"),
    (TENSOR, 69, 1, "make_tensor_decode", "(splits - 1) * chunk", "splits * chunk"),
    (NARROW_STRIP, 16, 1, "_make_load_values", "narrower = 4 *", "narrower = 8 *"),
    (INT8, 3, 1, "make_decode_masks", "key_factors[half] = float32(1)", "pass"),
    (INT8, 16, 1, "make_tensor_decode", "unit * key_scales[half]", "unit * key_scales[0]"),
    (INT8, 16, 1, "make_tensor_decode", "high *= value_factors[half]", "pass"),
    (INT8, 16, 1, "make_tensor_decode", "scores[n, i] = starts[n, i]", "scores[n, i] = 0"),
    (INT8, 16, 1, "make_tensor_decode", "sums[m, c] += offsets[m // products, c]", "pass"),
    (INT8, 16, 1, "_make_8_bits", "pool, element + 32 * half", "pool, element + 4 * half"),
    (INT8, 16, 1, "_make_8_bits", "words[0, 2], words[0, 1], w", "words[0, 1], words[0, 2], w"),
    (INT8, 16, 1, "_make_8_bits", "m % 2 * 2 * NEXT_COLUMN", "0"),
    (INT8, 16, 1, "_make_8_bits", "low_of(both) * float32(raised)", "low_of(both)"),
    (TWO_SLOTS, 133, 1, "make_tensor_decode", "y_scale) + slot * 4" + LOAD, "y_scale)" + LOAD),
    (TWO_SLOTS, 133, 1, "make_tensor_decode", "e_scale) + slot * 4" + LOAD, "e_scale)" + LOAD),
    (TWO_SLOTS, 133, 1, "make_partial_functions", "= shrink[slot] if", "= shrink[0] if"),
    (TWO_SLOTS, 133, 1, "make_partial_functions", "= share[slot] if", "= share[0] if"),
    (FLOAT8, 16, 1, "_make_8_bits", "if c < wide_columns else 32 * c + 8 * quad", ""),
    (FLOAT8, 16, 1, "_make_8_bits", "64 * s - 8 * (lane % 4)", "64 * s"),
    (FLOAT32_HALF, 3, 1, "make_float32_decode", "if is_valid else MINUS_INFINITY", ""),
    (FLOAT32, 3, 1, "make_float32_decode", "unit % parts", "0"),
    (TENSOR, 20, 1, "make_partial_functions", "sums[i, number] * peak[j]", "sums[i, number]"),
    (INT8, 20, 1, "make_partial_functions", "peak[j] *= one", "pass"),
    (TENSOR, 16, 1, "make_partial_functions", "pack(results[k], r", "pack(results[0], r"),
    (TENSOR, 69, 1, "make_partial_functions", "scaled_sum(so_far, o", "scaled_sum(0, o"),
    (TENSOR, 69, 2, "make_merge_chunks", "first_chunk + k < num_chunks", "True"),
    (WIDE, 16, 1, "_make_scarce", "m % 2 == 0", "m % 4 == 0"),
    (WIDE, 16, 1, "_make_scarce", "word = m % 2 * 2", "word = 0"),
    (WIDE_FLOAT32, 3, 1, "make_float32_decode", "first += i % vectors * READ_DIMS", "pass"),
    (FLOAT32_HALF, 3, 2, "make_merge_chunks", "state = k * slots + slot", "state = k * slots"),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_breakage_is_of_a_piece_of_the_source():
    for _, _, _, factory, old, _ in [*BREAKAGES, *MORE_BREAKAGES]:
        text = inspect.getsource(getattr(FACTORIES[factory][0], factory))
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {factory}"


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("variant", "tokens", "splits", "factory", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
)
def test_broken_arithmetic_gives_a_wrong_answer(
    variant, tokens, splits, factory, old, new, break_source
):
    break_source(factory, old, new)
    case = draw_case(variant, (tokens,), num_kv_heads=1, splits=splits)

    assert case.errors(simulate(case))["out"] > 2 * case.expected["out"].tolerance


# Variant, tokens, window, splits, factory, old, new.
WINDOW_BREAKAGES = [
    (WINDOW, 40, 20, 1, "make_tensor_decode", "num_valid - window", "num_valid - window - 1"),
    (WINDOW, 40, 20, 1, "make_decode_masks", "> int32(8 * half)", ">= int32(8 * half)"),
    (
        WINDOW,
        40,
        20,
        1,
        "make_decode_masks",
        "clear_first_values(values, num_before, quad)",
        "pass",
    ),
    (WINDOW_INT8, 40, 20, 1, "make_decode_masks", "value_factors[half] = float32(0)", "pass"),
    (WINDOW_FLOAT32, 40, 20, 1, "make_float32_decode", "wanted = wanted and", "_ ="),
    (WINDOW_FLOAT32, 40, 20, 1, "make_float32_decode", "is_valid = is_valid and", "_ ="),
]
MORE_WINDOW_BREAKAGES = [
    (WINDOW, 40, 20, 1, "_make_16_bits", "num_before - quad * 2", "num_before - quad"),
    (WINDOW, 40, 20, 1, "make_decode_masks", "num_before - quad_row", "num_before - quad"),
    (
        WINDOW,
        150,
        100,
        1,
        "make_tensor_decode",
        "+ 1, chunk_tiles, first_tile)",
        "+ 1, chunk_tiles, 0)",
    ),
    (WINDOW_FLOAT32, 40, 20, 1, "make_float32_decode", "num_before - tokens_of_turn", "num_before"),
    (WINDOW_FLOAT32, 41, 20, 1, "make_float32_decode", "num_before - token_of_lane", "num_before"),
    (
        WINDOW_FLOAT32,
        150,
        100,
        1,
        "make_float32_decode",
        "end_tile, first_tile + (c",
        "end_tile, (c",
    ),
]


def test_every_breakage_of_a_window_is_of_a_piece_of_the_source():
    for *_, factory, old, _ in [*WINDOW_BREAKAGES, *MORE_WINDOW_BREAKAGES]:
        text = inspect.getsource(getattr(FACTORIES[factory][0], factory))
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {factory}"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "tokens", "window", "splits", "factory", "old", "new"),
    [
        *WINDOW_BREAKAGES,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_WINDOW_BREAKAGES),
    ],
)
def test_a_window_that_is_cut_wrongly_gives_a_wrong_answer(
    variant, tokens, window, splits, factory, old, new, break_source
):
    case = draw_case(variant, (tokens,), num_kv_heads=1, splits=splits, window=window)
    assert case.faults(simulate(case)) == []

    break_source(factory, old, new)

    assert case.errors(simulate(case))["out"] > 2 * case.expected["out"].tolerance


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


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "old", "new"),
    [
        pytest.param("bfloat16", None, "mass[j] *= shrink[j]", "pass", marks=pytest.mark.slow),
        ("bfloat16", None, "sums[m, c] *= shrink[m // products * 2 + c % 2]", "pass"),
        ("bfloat16", "int8", "offsets[n, i] *= shrink[j]", "pass"),
        pytest.param(  # beyond a float16
            "float16", None, "> SLACK", "> SLACK * SLACK", marks=pytest.mark.slow
        ),
    ],
)
def test_a_peak_that_rises_in_a_later_tile_is_followed(
    dtype, kv_dtype, old, new, monkeypatch, break_source
):
    monkeypatch.setattr(attention_chunks, "CHUNK_TILES", 16)
    monkeypatch.setattr(attention_chunks, "FEW_CHUNKS", 1)  # a sharer has several tiles of a chunk
    case = draw_case(DecodeVariant(dtype, 64, 2, 16, kv_dtype), (150,), num_kv_heads=1)
    break_source("make_tensor_decode", old, old)
    assert case.faults(simulate(case)) == []

    break_source("make_tensor_decode", old, new)

    assert case.errors(simulate(case))["out"] > 2 * case.expected["out"].tolerance
