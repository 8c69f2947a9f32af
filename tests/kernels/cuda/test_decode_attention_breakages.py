"""Proof that the tests of decode attention notice: sums, masks, places and windows are broken."""

from __future__ import annotations

import inspect

import pytest

from bench.gpu.cases.attention_decode import draw_case
from kernels.cuda import attention_chunks
from kernels.cuda.attention_decode import DecodeVariant
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
from tests.kernels.cuda.simulation import simulate

__all__ = ["break_source"]
pytestmark = pytest.mark.usefixtures("short_chunks")

NARROW_STRIP = DecodeVariant("float16", 96, 1, 16)
FLOAT8 = DecodeVariant("float16", 96, 1, 16, "float8")
TWO_SLOTS = DecodeVariant("bfloat16", 64, 16, 32, "int8")
WIDE_FLOAT32 = DecodeVariant("float32", 256, 2, 16)
WINDOW_INT8 = DecodeVariant("bfloat16", 64, 3, 16, "int8", True)
WINDOW_FLOAT32 = DecodeVariant("float32", 64, 2, 16, None, True)

# What follows lines of the loop where the next tile is read.
IF, LOAD = "\n" + 16 * " " + "if", "\n" + 20 * " " + "load"

BREAKAGES = [
    # Values behind the row's end are NaN, and so are their scores.
    (TENSOR, 3, 1, "_make_16_bits", "values[4 * s + j, word] = uint32(0)", "pass"),
    (TENSOR, 16, 1, "make_tensor_decode", "new_peak, 4 << s", "new_peak, 2 << s"),
    (TENSOR, 16, 1, "_make_16_bits", "8 * half * head_size", "half * head_size"),
    (TENSOR, 133, 2, "make_tensor_decode", "(splits - 1) * chunk", "0 * chunk"),
    (INT8, 16, 1, "make_tensor_decode", "factor * key_scales[half] if", "factor if"),
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
    (INT8, 16, 1, "make_tensor_decode", "factor * key_scales[half]", "factor * key_scales[0]"),
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
