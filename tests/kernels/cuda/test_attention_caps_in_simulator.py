"""Attention whose scores have a cap: the kernels' own source against the specification."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import to_stored
from bench.gpu.cases import attention_decode as decode_cases
from bench.gpu.cases import attention_prefill as prefill_cases
from bench.gpu.cases.block_pool import draw_pool
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import (
    BLOCK_SIZES,
    GROUPS_WITH_CAPS,
    HEAD_SIZES_WITH_CAPS,
    MOST_GROUPS,
)
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_kv import POOL_DTYPES
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")

CAPPED, WINDOW = {"has_cap": True}, {"has_window": True, "has_cap": True}


def named(value):
    return getattr(value, "name", None) or str(value)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "seq_lens", "splits", "window", "cap"),
    [
        # Rows of several chunks, of one, of nothing; Gemma 2's cap, and those most scores reach.
        (DecodeVariant("bfloat16", 256, 2, 16, **WINDOW), (150, 0, 3), 2, 100, 15.0),
        (DecodeVariant("float32", 128, 2, 32, **CAPPED), (70, 1), 1, None, 50.0),
        (DecodeVariant("float16", 128, 4, 16, "int8", **WINDOW), (133, 33), 1, 70, 0.7),
        (DecodeVariant("float32", 256, 4, 16, **WINDOW), (0, 90), 2, 70, 0.7),
        (DecodeVariant("bfloat16", 128, 1, 32, **CAPPED), (133, 17), 3, None, 50.0),
        (DecodeVariant("float16", 256, 4, 32, "float8", **CAPPED), (150,), 2, None, 15.0),
        (DecodeVariant("bfloat16", 256, 8, 16, "int8", **WINDOW), (40, 62), 1, 15, 50.0),
        (DecodeVariant("float16", 256, 1, 32, **CAPPED), (65, 16), 1, None, 0.7),
        (DecodeVariant("bfloat16", 64, 12, 16, **WINDOW), (70, 1), 1, 1, 3.0),
        (DecodeVariant("float16", 96, 3, 32, "float8", **CAPPED), (45, 80), 1, None, 3.0),
        (DecodeVariant("float32", 64, 5, 16, **CAPPED), (0, 65), 2, None, 3.0),
    ],
    ids=named,
)
def test_decode_attention_with_a_cap_equals_the_specification(
    variant, seq_lens, splits, window, cap
):
    case = decode_cases.draw_case(
        variant, seq_lens, splits=splits, num_kv_heads=2, window=window, cap=cap
    )
    assert case.faults(simulate(case)) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows", "window", "cap"),
    [
        (PrefillVariant("bfloat16", 256, 2, 16, **WINDOW), ((2, 70), (0, 5), (11, 11)), 50, 15.0),
        (PrefillVariant("float16", 128, 2, 32, "int8", **CAPPED), ((3, 100), (1, 3)), None, 0.7),
        (PrefillVariant("float32", 128, 2, 16, **WINDOW), ((3, 50), (0, 9)), 34, 50.0),
        (PrefillVariant("bfloat16", 128, 4, 32, **CAPPED), ((20, 90),), None, 50.0),
        (PrefillVariant("float16", 256, 1, 32, "float8", **WINDOW), ((3, 68),), 20, 15.0),
        (PrefillVariant("float32", 256, 2, 32, **CAPPED), ((3, 36), (1, 1)), None, 0.7),
        (PrefillVariant("bfloat16", 64, 3, 16, **WINDOW), ((2, 150), (11, 11)), 100, 3.0),
        (PrefillVariant("float16", 96, 5, 32, "int8", **CAPPED), ((14, 80),), None, 3.0),
        (PrefillVariant("float32", 64, 3, 16, **CAPPED), ((2, 40),), None, 3.0),
    ],
    ids=named,
)
def test_prefill_attention_with_a_cap_equals_the_specification(variant, rows, window, cap):
    case = prefill_cases.draw_case(variant, rows, num_kv_heads=2, window=window, cap=cap)
    assert case.faults(simulate(case)) == []


FAR = [("bfloat16", None), ("float32", None), ("float16", "float8")]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("dtype", "kv_dtype"), FAR)
@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_scores_far_beyond_the_cap_are_the_cap(kind, dtype, kv_dtype):
    """Of both signs, and so far out that their powers of two are none that a float32 holds."""
    variant = kind(dtype, 128, 2, 16, kv_dtype, **CAPPED)
    rng = np.random.default_rng(3)
    pool = draw_pool(
        rng, dtype, (37,), num_kv_heads=1, block_size=16, head_size=128, kv_dtype=kv_dtype
    )
    query = to_stored(dtype, 2000 * rng.standard_normal((1, 3, 128)))
    queries = () if kind is DecodeVariant else (np.array([1], np.int32),)
    make_case = decode_cases.make_case if kind is DecodeVariant else prefill_cases.make_case
    case = make_case(variant, query, *queries, pool, cap=0.5)
    assert case.faults(simulate(case)) == []
    scores = case.expected["out"].values  # of a sum of values, half of which have e times the rest
    assert 0.05 < np.abs(scores).mean() < 0.5


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_scores_as_large_as_the_cap_of_models_keep_their_digits(kind, dtype):
    """Scores of a hundred and more: some of a row are near the cap, and what is between counts."""
    variant = kind(dtype, 128, 2, 16, **CAPPED)
    rng = np.random.default_rng(4)
    pool = draw_pool(rng, dtype, (70,), num_kv_heads=1, block_size=16, head_size=128)
    query = to_stored(dtype, 40 * rng.standard_normal((1, 3, 128)))
    queries = () if kind is DecodeVariant else (np.array([1], np.int32),)
    make_case = decode_cases.make_case if kind is DecodeVariant else prefill_cases.make_case
    case = make_case(variant, query, *queries, pool, cap=50.0)
    assert case.faults(simulate(case)) == []


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        DecodeVariant("bfloat16", 256, 2, 16, **WINDOW),
        DecodeVariant("float32", 128, 2, 16, **WINDOW),
        pytest.param(
            DecodeVariant("float16", 128, 2, 16, "int8", **WINDOW), marks=pytest.mark.slow
        ),
    ],
    ids=named,
)
def test_bits_of_decode_attention_do_not_depend_on_neighbours_splits_or_the_order_of_threads(
    variant,
):
    case = decode_cases.draw_case(
        variant, (150, 3), num_kv_heads=1, window=130, alone=0, splits_alone=3
    )
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "rows", "window"),
    [
        (PrefillVariant("bfloat16", 128, 2, 16, **CAPPED), ((34, 80), (1, 3)), None),
        (PrefillVariant("bfloat16", 256, 2, 16, **WINDOW), ((34, 80), (1, 3)), 30),
        (PrefillVariant("float32", 128, 2, 16, **WINDOW), ((10, 70), (1, 3)), 34),
        pytest.param(
            PrefillVariant("float16", 256, 4, 32, "int8", **WINDOW), ((20, 75), (1, 3)), 9,
            marks=pytest.mark.slow,
        ),
    ],
    ids=named,
)  # fmt: skip
def test_bits_of_prefill_attention_do_not_depend_on_chunks_or_other_rows(variant, rows, window):
    case = prefill_cases.draw_case(variant, rows, window=window, num_kv_heads=1, alone=(0, 2))
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype"), POOL_DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("group", GROUPS_WITH_CAPS)
@pytest.mark.parametrize("head_size", HEAD_SIZES_WITH_CAPS)
@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_every_variant_with_a_cap_equals_the_specification(
    kind, has_window, head_size, group, block_size, dtype, kv_dtype
):
    variant = kind(dtype, head_size, group, block_size, kv_dtype, has_window, has_cap=True)
    window = 37 + group if has_window else None
    of_case = {"num_kv_heads": 1, "seed": group, "window": window}
    if isinstance(variant, DecodeVariant):
        lengths = (104, 0, block_size - 1)
        case = decode_cases.draw_case(variant, lengths, splits=1 + group % 3, **of_case)
    else:
        rows = ((variant.tile_tokens + 1, variant.tile_tokens + 40), (0, 20), (2, 69))
        case = prefill_cases.draw_case(variant, rows, **of_case)

    assert case.faults(simulate(case, seed=group)) == []


@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_there_are_no_sinks_beside_a_cap(kind):
    with pytest.raises(UnsupportedVariantError, match="has_cap must be False beside sinks"):
        kind("bfloat16", 64, 2, 16, has_sinks=True, has_cap=True)


@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_every_head_size_may_have_a_cap_which_its_name_says(kind):
    for head_size in MOST_GROUPS:
        variant = kind("bfloat16", head_size, 2, 16, None, True, has_cap=True)
        plain = dataclasses.replace(variant, has_cap=False)
        assert variant.name == f"{plain.name}_cap"
        assert variant.arguments == plain.arguments
        assert variant.expectation == plain.expectation
