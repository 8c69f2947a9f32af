"""Attention over latents, thread by thread: right, and bits that follow from a row alone.

Chunks are shortened to four tiles, 64 tokens, so that short rows have several.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.cases.block_pool import LAYER
from bench.gpu.cases.latent_attention import (
    LatentRows,
    decode_case,
    draw_decode,
    draw_prefill,
    draw_queries,
    draw_rows,
)
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")

DECODE = LatentDecodeVariant("bfloat16", 2, 256, 32, 16)
DECODE_FLOAT32 = LatentDecodeVariant("float32", 2, 256, 32, 16)
PREFILL = LatentPrefillVariant("bfloat16", 3, 256, 32, 16)
PREFILL_FLOAT32 = LatentPrefillVariant("float32", 3, 256, 32, 16)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "seq_lens", "splits"),
    [
        (LatentDecodeVariant("bfloat16", 4, 256, 32, 16), (1, 0, 67), 2),
        (LatentDecodeVariant("float16", 20, 256, 64, 32), (19,), 1),
        (LatentDecodeVariant("float32", 5, 256, 32, 32), (17, 0), 1),
        (LatentDecodeVariant("bfloat16", 16, 512, 64, 16), (17,), 1),
        (LatentDecodeVariant("float16", 1, 512, 32, 32), (0, 66, 16), 2),
        (LatentDecodeVariant("bfloat16", 128, 512, 64, 32), (35,), 1),
        (LatentDecodeVariant("bfloat16", 16, 256, 64, 32), (133, 129, 64), 3),
        (LatentDecodeVariant("float32", 1, 512, 64, 16), (0, 69, 15), 2),
        (LatentDecodeVariant("float32", 16, 512, 32, 16), (20,), 1),
        (LatentDecodeVariant("float32", 4, 256, 64, 16), (133, 129, 64), 3),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_decode_equals_the_specification(variant, seq_lens, splits):
    case = draw_decode(variant, seq_lens, splits=splits)

    assert case.faults(simulate(case)) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        # A whole prompt and a single token; behind a prefix, a row without queries; heads that
        # take two tiles of places, and two units.
        (LatentPrefillVariant("bfloat16", 4, 256, 32, 16), ((10, 10), (1, 1))),
        (LatentPrefillVariant("float16", 20, 256, 64, 32), ((1, 35), (0, 5))),
        (LatentPrefillVariant("float32", 3, 256, 32, 16), ((2, 18), (1, 1))),
        (LatentPrefillVariant("bfloat16", 40, 512, 64, 16), ((1, 18),)),
        (LatentPrefillVariant("float16", 1, 512, 32, 32), ((33, 40), (0, 0), (2, 66))),
        (LatentPrefillVariant("bfloat16", 16, 512, 64, 32), ((5, 36), (17, 17), (3, 3))),
        (LatentPrefillVariant("bfloat16", 128, 512, 64, 16), ((2, 20),)),
        (LatentPrefillVariant("float32", 20, 512, 64, 32), ((2, 35), (0, 33))),
        (LatentPrefillVariant("float32", 1, 256, 64, 16), ((9, 9), (5, 72))),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_prompts_equal_the_specification(variant, rows):
    case = draw_prefill(variant, rows)

    assert case.faults(simulate(case)) == []


@pytest.mark.wide
@pytest.mark.parametrize("variant", [DECODE, DECODE_FLOAT32], ids=lambda one: one.name)
def test_a_rows_bits_do_not_depend_on_its_neighbours_the_splits_or_the_order_of_threads(variant):
    case = draw_decode(variant, (69, 3), alone=0, splits_alone=2)
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(DECODE, marks=pytest.mark.wide),
        pytest.param(DECODE_FLOAT32, marks=pytest.mark.slow),
    ],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize(("splits", "split_rows"), [(2, 3), (3, 2), (5, None)])
def test_whole_rows_behind_split_ones_have_their_bits_as_well(variant, splits, split_rows):
    # More chunks than the merge reads at a time, none, one; fewer than blocks of threads.
    lengths = (261, 0, 129, 16, 69)
    whole = draw_decode(variant, lengths)
    parted = draw_decode(variant, lengths, splits=splits, split_rows=split_rows)

    outputs = simulate(parted, seed=1)

    assert parted.faults(outputs) == []
    np.testing.assert_array_equal(outputs["out"], simulate(whole)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "chunk"),
    [
        (PREFILL, 4),  # of 12 tokens, in tiles of 10 and 2
        pytest.param(PREFILL_FLOAT32, 2, marks=pytest.mark.wide),
        pytest.param(LatentPrefillVariant("float16", 20, 256, 32, 32), 3, marks=pytest.mark.wide),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_a_tokens_bits_do_not_depend_on_its_neighbours_or_where_a_prompt_is_cut(variant, chunk):
    case = draw_prefill(variant, ((3 * chunk, 4 * chunk + 9), (1, 2)), alone=(0, chunk))
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [DECODE, pytest.param(DECODE_FLOAT32, marks=pytest.mark.wide)],
    ids=lambda one: one.name,
)
def test_a_rows_bits_do_not_depend_on_the_block_size(variant):
    """The same row in blocks of 32, and in blocks of 16 that are their halves."""
    large = dataclasses.replace(variant, block_size=32)
    rng = np.random.default_rng(0)
    rows, queries = draw_rows(rng, large, (43,)), draw_queries(rng, large, 1)
    num_blocks, layers, _, size = rows.pool.shape
    halves = np.moveaxis(rows.pool.reshape(num_blocks, layers, 2, 16, size), 2, 1)
    small = LatentRows(
        np.ascontiguousarray(halves).reshape(2 * num_blocks, layers, 16, size),
        (2 * rows.tables[:, :, None] + np.arange(2, dtype=np.int32)).reshape(1, -1),
        rows.seq_lens,
    )

    of_large = simulate(decode_case(large, queries, rows))
    of_small = simulate(decode_case(variant, queries, small))

    np.testing.assert_array_equal(of_small["out"], of_large["out"])


@pytest.mark.parametrize("token", [20, 28])
def test_one_score_far_above_all_before_it_is_followed_in_either_half_of_a_tile(token):
    # The tile is not the first, and two to the power of that score is no float32.
    rng = np.random.default_rng(0)
    rows, queries = draw_rows(rng, DECODE, (32,)), draw_queries(rng, DECODE, 1)
    of_row = rows.pool[rows.tables[0, token // 16], LAYER, token % 16]
    of_row[:256] = queries[0, 1, :256]  # along the second head's query
    of_row[256:] = np.where(queries[0, 1, 256:] < 0x8000, 0x42C8, 0xC2C8)  # 100 times its sign
    case = decode_case(DECODE, queries, rows)

    assert case.faults(simulate(case)) == []


@pytest.mark.parametrize("variant", [DECODE, DECODE_FLOAT32], ids=lambda one: one.name)
def test_nan_that_a_row_owns_reaches_its_output_and_no_other(variant):
    case = draw_decode(variant, (4, 4))
    nan = np.nan if variant.is_float32 else 0x7FFF
    case.arrays["pool"][case.arrays["block_tables"][1, 0], LAYER, 3, -1] = nan  # row 1's last

    out = simulate(case)["out"]

    is_nan = np.isnan(out) if variant.is_float32 else (out & 0x7FFF) > 0x7F80
    assert not is_nan[0].any()
    assert is_nan[1].all()


def test_the_plan_splits_few_long_rows_and_holds_what_their_chunks_leave(monkeypatch):
    monkeypatch.undo()
    variant = LatentDecodeVariant("bfloat16", 16, 512, 64, 16)
    plan = variant.plan(1, 16384, 132)
    assert plan.grid == (1, plan.splits, 1)
    assert plan.split_rows == 1
    assert plan.splits > 16
    # 64 chunks of 16 heads, of 512 sums each; two peaks and two masses of each thread.
    assert plan.num_partials == 64 * (16 * 512 + 4 * 128)
    assert variant.plan(512, 16384, 132).grid == (1, 1, 512)
    assert variant.plan(4, 0, 132).num_partials == 0
    wide = LatentDecodeVariant("bfloat16", 40, 256, 32, 16)
    assert wide.plan_of(5, 100, 2, 3).grid == (3, 2, 4)
    assert LatentDecodeVariant("float32", 6, 256, 32, 16).plan_of(2, 9).grid == (2, 1, 2)


def test_query_tiles_have_as_many_tokens_as_their_heads_leave_places_for():
    def tile(dtype: str, num_heads: int) -> tuple[int, int]:
        variant = LatentPrefillVariant(dtype, num_heads, 256, 32, 16)
        return variant.tile_tokens, variant.grid(7)[1]

    assert [tile("bfloat16", heads) for heads in (1, 3, 16, 17, 40, 128)] == [
        (32, 1), (10, 1), (2, 1), (1, 1), (1, 2), (1, 4),
    ]  # fmt: skip
    assert [tile("float32", heads) for heads in (1, 3, 4, 5)] == [(4, 1), (1, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatentDecodeVariant("int8", 4, 256, 32, 16), "dtype must be one of float32"),
        (lambda: LatentDecodeVariant("float32", 0, 256, 32, 16), "num_heads must be between 1"),
        (lambda: LatentPrefillVariant("float32", 129, 256, 32, 16), "between 1 and 128, got 129"),
        (lambda: LatentDecodeVariant("float32", 4, 384, 32, 16), "rank must be one of 256, 512"),
        (lambda: LatentDecodeVariant("float32", 4, 256, 16, 16), "turning must be one of 32, 64"),
        (lambda: LatentDecodeVariant("float32", 4, 256, 32, 8), "block_size must be one of 16"),
    ],
)
def test_what_no_kernel_is_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
