"""The decode attention kernels' own source, run thread by thread against the specification.

Chunks are shortened to four tiles, 64 tokens, so that short rows have several.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import to_stored
from bench.gpu.cases import draw_cases
from bench.gpu.cases.attention_decode import draw_case, make_case
from bench.gpu.cases.block_pool import LAYER, draw_pool, to_pool
from kernels.cuda import attention_chunks
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_variant import DTYPES
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "seq_lens", "splits"),
    [
        (DecodeVariant("bfloat16", 64, 3, 16), (1, 0, 67), 1),
        (DecodeVariant("bfloat16", 128, 8, 32), (33,), 1),
        (DecodeVariant("float16", 96, 9, 16), (0, 19), 2),
        (DecodeVariant("float16", 64, 1, 32), (0, 65), 2),
        (DecodeVariant("float32", 64, 2, 16), (0, 65), 2),
        (DecodeVariant("float32", 96, 5, 32), (7, 0), 1),
        (DecodeVariant("float32", 128, 1, 16), (15, 17), 1),
        (DecodeVariant("bfloat16", 64, 3, 16, "int8"), (67,), 2),
        (DecodeVariant("float16", 96, 2, 32, "float8"), (0, 19), 1),
        (DecodeVariant("bfloat16", 128, 9, 32, "float8"), (9,), 1),
        (DecodeVariant("bfloat16", 256, 3, 32), (0, 67), 2),
        (DecodeVariant("float16", 256, 8, 16, "int8"), (9,), 1),
        (DecodeVariant("float32", 256, 4, 16), (19, 0), 2),
        # A warp's later tiles in a block's second half; heads of two slots through three chunks.
        (DecodeVariant("bfloat16", 64, 16, 32, "int8"), (133, 0), 1),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_decode_attention_equals_the_specification(variant, seq_lens, splits):
    case = draw_case(variant, seq_lens, splits=splits, num_kv_heads=len(seq_lens) % 2 + 1)

    assert case.faults(simulate(case)) == []


@pytest.mark.wide
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_row_of_1100_tokens_has_the_chunks_of_its_plan(kv_dtype, monkeypatch):
    # 6 of 12 tiles, or 5 of 16 in a pool of 8 bits.
    for name, tiles in (("CHUNK_TILES", 16), ("LEAST_CHUNK_TILES", 8)):
        monkeypatch.setattr(attention_chunks, name, tiles)
    variant = DecodeVariant("bfloat16", 64, 2, 16, kv_dtype)
    case = draw_case(variant, (1100, 3), num_kv_heads=1, splits=4)

    assert case.faults(simulate(case)) == []


@pytest.mark.parametrize("token", [65, 73])
def test_one_score_far_above_all_before_it_is_followed_in_either_half_of_a_tile(token, monkeypatch):
    # The token's tile is not its warp's first, and two to the power of its score is no float32.
    monkeypatch.setattr(attention_chunks, "CHUNK_TILES", 16)
    monkeypatch.setattr(attention_chunks, "FEW_CHUNKS", 1)
    rng = np.random.default_rng(0)
    pool = draw_pool(
        rng, "bfloat16", (80,), num_kv_heads=1, block_size=16, head_size=64, kv_dtype="int8"
    )
    values = pool.exact
    values[pool.tables[0, token // 16], LAYER, 0, 0, token % 16] = 20.0
    pool = dataclasses.replace(pool, pool=to_pool("bfloat16", "int8", values))
    query = to_stored("bfloat16", np.ones((1, 3, 64)))
    case = make_case(DecodeVariant("bfloat16", 64, 2, 16, "int8"), query, pool)

    assert case.faults(simulate(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cases_a_gpu_is_given_pass_with_chunks_of_their_full_length(dtype, monkeypatch):
    monkeypatch.undo()
    for case in draw_cases(DecodeVariant(dtype, 64, 2, 16)):
        outputs = simulate(case)
        assert case.faults(outputs) == []
        part, select = case.part
        np.testing.assert_array_equal(simulate(part)["out"], select(outputs)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("lengths", "seed"),
    [
        # Ten chunks are more than a thread reads at a time; rows of no chunk and of one.
        ((620, 0, 1), 0),
        pytest.param((620, 0, 1, 65), 1, marks=pytest.mark.slow),
    ],
)
def test_any_block_may_be_the_last_of_a_row_and_launches_of_other_splits_share_tickets(
    lengths, seed
):
    variant = DecodeVariant("float32", 64, 2, 16)
    case = draw_case(variant, lengths, num_kv_heads=1, splits=3)
    (launch,) = case.launches
    launches = tuple(
        dataclasses.replace(launch, grid=variant.plan_of(len(lengths), 1, 620, splits).grid)
        for splits in (11, 2)
    )

    outputs = simulate(dataclasses.replace(case, launches=launches), seed=seed)

    assert case.faults(outputs) == []


@pytest.mark.slow
def test_a_row_of_ten_chunks_has_the_same_bits_in_any_number_of_parts():
    variant = DecodeVariant("float32", 64, 2, 16)
    whole, parted = (
        draw_case(variant, (620, 0, 1, 65), num_kv_heads=1, splits=splits) for splits in (1, 3)
    )

    np.testing.assert_array_equal(simulate(parted, seed=1)["out"], simulate(whole)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "lengths", "num_kv_heads", "splits", "split_rows"),
    [
        (DecodeVariant("bfloat16", 64, 2, 16), (133, 5, 69, 0, 17), 2, 2, 1),
        (DecodeVariant("float32", 96, 5, 16), (69, 1, 17, 0, 65), 1, 3, 2),
        pytest.param(
            DecodeVariant("float16", 96, 9, 32, "int8"), (0, 197, 3, 1, 69), 2, 2, 3,
            marks=pytest.mark.slow,
        ),
        (DecodeVariant("bfloat16", 256, 2, 16), (69, 0, 5), 2, 2, 1),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)  # fmt: skip
def test_whole_rows_behind_split_ones_have_their_bits_as_well(
    variant, lengths, num_kv_heads, splits, split_rows
):
    whole, parted = (
        draw_case(variant, lengths, num_kv_heads=num_kv_heads, splits=splits, split_rows=of_these)
        for splits, of_these in ((1, 0), (splits, split_rows))
    )

    outputs = simulate(parted, seed=1)

    assert parted.faults(outputs) == []
    np.testing.assert_array_equal(outputs["out"], simulate(whole)["out"])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("dtype", "head_size", "kv_dtype"),
    [
        ("bfloat16", 64, None),
        ("bfloat16", 256, None),
        ("float32", 64, None),
        pytest.param("float32", 256, None, marks=pytest.mark.slow),
        pytest.param("float16", 64, "int8", marks=pytest.mark.slow),
    ],
)
def test_a_rows_bits_do_not_depend_on_its_neighbours_the_splits_or_the_order_of_threads(
    dtype, head_size, kv_dtype
):
    variant = DecodeVariant(dtype, head_size, 2, 16, kv_dtype)
    case = draw_case(variant, (69, 3), num_kv_heads=1, alone=0, splits_alone=2)
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


def test_a_rows_bits_do_not_depend_on_the_block_size():
    """The same row in blocks of 32, and in blocks of 16 that are their halves."""
    large = DecodeVariant("bfloat16", 64, 2, 32)
    rng = np.random.default_rng(0)
    pool = draw_pool(rng, "bfloat16", (75,), num_kv_heads=1, block_size=32, head_size=64)
    query = to_stored("bfloat16", rng.standard_normal((1, 3, 64)))
    num_blocks, layers, *_ = pool.pool.shape
    halves = np.moveaxis(pool.pool.reshape(num_blocks, layers, 2, 1, 2, 16, 64), 4, 1)
    tables = (2 * pool.tables[:, :, None] + np.arange(2, dtype=np.int32)).reshape(1, -1)
    small_pool = dataclasses.replace(
        pool,
        pool=np.ascontiguousarray(halves).reshape(2 * num_blocks, layers, 2, 1, 16, 64),
        tables=tables,
    )

    of_large = simulate(make_case(large, query, pool))
    of_small = simulate(make_case(DecodeVariant("bfloat16", 64, 2, 16), query, small_pool))

    np.testing.assert_array_equal(of_small["out"], of_large["out"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_that_a_row_owns_reaches_its_output_and_no_other(dtype):
    variant = DecodeVariant(dtype, 64, 2, 16)
    case = draw_case(variant, (4, 4), num_kv_heads=1)
    nan = np.nan if dtype == "float32" else 0x7FFF
    case.arrays["pool"][case.arrays["block_tables"][1, 0], 1, 0, 0, 3] = nan  # row 1's last key

    out = simulate(case)["out"]

    is_nan = np.isnan(out) if dtype == "float32" else (out & 0x7FFF) > 0x7F80
    assert not is_nan[0].any()
    assert is_nan[1].all()


def test_nan_in_a_token_of_eight_bits_reaches_its_row_and_no_other():
    case = draw_case(DecodeVariant("bfloat16", 64, 2, 16, "int8"), (4, 4), num_kv_heads=1)
    head = case.arrays["pool"][case.arrays["block_tables"][1, 0], LAYER, 1, 0]
    head[16 * 64 :].view(np.float32)[3] = np.nan  # the scale of row 1's last value

    out = simulate(case)["out"]

    is_nan = (out & 0x7FFF) > 0x7F80
    assert not is_nan[0].any()
    assert is_nan[1].all()
