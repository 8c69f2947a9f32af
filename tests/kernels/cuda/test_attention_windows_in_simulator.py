"""Attention with windows: the kernels' own source against the specification, thread by thread.

What lies before a window is as hostile as what lies behind a row's end (`before_hidden`): NaN, and
blocks that are outside of the pool. Chunks of decode attention are of 64 tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import to_stored
from bench.gpu.cases import attention_decode, attention_prefill
from bench.gpu.cases.block_pool import draw_pool
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")


def without_window(variant):
    return dataclasses.replace(variant, has_window=False)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "seq_lens", "window", "splits"),
    [
        # Rows longer than the window, as long, shorter, and of nothing.
        (DecodeVariant("bfloat16", 64, 3, 16, None, True), (67, 33, 7, 0), 33, 1),
        (DecodeVariant("bfloat16", 128, 8, 32, None, True), (49,), 17, 1),
        # Several chunks; the first tile in a block's second half.
        (DecodeVariant("float16", 64, 1, 32, None, True), (190, 3), 140, 2),
        (DecodeVariant("float16", 96, 9, 16, None, True), (40, 16), 1, 1),
        (DecodeVariant("float32", 64, 2, 16, None, True), (0, 150), 85, 2),
        (DecodeVariant("float32", 96, 5, 32, None, True), (70, 21), 20, 1),
        (DecodeVariant("float32", 128, 1, 16, None, True), (37, 48), 16, 1),
        (DecodeVariant("bfloat16", 64, 3, 16, "int8", True), (150,), 81, 2),
        (DecodeVariant("float16", 96, 2, 32, "float8", True), (45, 62), 15, 1),
        (DecodeVariant("bfloat16", 128, 9, 32, "float8", True), (50,), 3, 1),
        # A window that ends where the row begins to be longer than it.
        (DecodeVariant("float16", 64, 4, 16, "int8", True), (33, 32, 31), 32, 1),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_decode_attention_with_a_window_equals_the_specification(variant, seq_lens, window, splits):
    case = attention_decode.draw_case(
        variant, seq_lens, window=window, splits=splits, num_kv_heads=len(seq_lens) % 2 + 1
    )

    assert case.faults(simulate(case)) == []


@pytest.mark.wide
@pytest.mark.parametrize("kind", [("bfloat16", None), ("float32", None), ("float16", "int8")])
@pytest.mark.parametrize("window", [70, 1000])
def test_rows_within_the_window_have_the_bits_of_decode_attention_without_one(kind, window):
    dtype, kv_dtype = kind
    variant = DecodeVariant(dtype, 64, 2, 16, kv_dtype, True)
    lengths = (70, 0, 17)
    case = attention_decode.draw_case(variant, lengths, window=window, num_kv_heads=1)
    plain = attention_decode.draw_case(without_window(variant), lengths, num_kv_heads=1)

    np.testing.assert_array_equal(simulate(case)["out"], simulate(plain)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", None),
        ("float32", None),
        pytest.param("float16", "int8", marks=pytest.mark.slow),
    ],
)
def test_bits_of_decode_attention_do_not_depend_on_neighbours_splits_or_the_order_of_threads(
    dtype, kv_dtype
):
    variant = DecodeVariant(dtype, 64, 2, 16, kv_dtype, True)
    case = attention_decode.draw_case(
        variant, (150, 3), num_kv_heads=1, window=90, alone=0, splits_alone=3
    )
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


def test_bits_of_decode_attention_do_not_depend_on_the_block_size():
    """The same row in blocks of 32, and in blocks of 16 that are their halves."""
    rng = np.random.default_rng(0)
    pool = draw_pool(rng, "bfloat16", (120,), num_kv_heads=1, block_size=32, head_size=64)
    query = to_stored("bfloat16", rng.standard_normal((1, 3, 64)))
    num_blocks, layers, *_ = pool.pool.shape
    halves = np.moveaxis(pool.pool.reshape(num_blocks, layers, 2, 1, 2, 16, 64), 4, 1)
    tables = (2 * pool.tables[:, :, None] + np.arange(2, dtype=np.int32)).reshape(1, -1)
    small_pool = dataclasses.replace(
        pool,
        pool=np.ascontiguousarray(halves).reshape(2 * num_blocks, layers, 2, 1, 16, 64),
        tables=tables,
    )

    in_32, in_16 = (
        simulate(
            attention_decode.make_case(
                DecodeVariant("bfloat16", 64, 2, size, None, True), query, one, window=70
            )
        )
        for size, one in ((32, pool), (16, small_pool))
    )

    np.testing.assert_array_equal(in_16["out"], in_32["out"])


def test_a_token_before_the_window_does_not_matter_to_the_last_bit():
    variant = DecodeVariant("bfloat16", 64, 2, 16, None, True)
    case = attention_decode.draw_case(variant, (90,), num_kv_heads=1, window=35)
    first = 90 - 35
    block = case.arrays["block_tables"][0, first // 16]
    pool = case.arrays["pool"].copy()
    pool[block, 1, :, :, : first % 16] = to_stored("bfloat16", np.float32(3e38))
    other = dataclasses.replace(case, arrays={**case.arrays, "pool": pool})

    np.testing.assert_array_equal(simulate(other)["out"], simulate(case)["out"])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows", "window"),
    [
        # Tiles of 64 keys: a window within one, over two, of none of the first's; the whole row.
        (PrefillVariant("bfloat16", 64, 3, 16, None, True), ((2, 150), (0, 5), (11, 11)), 20),
        (PrefillVariant("bfloat16", 64, 16, 32, None, True), ((3, 140),), 75),
        # Over three tiles of queries; warps whose first tokens see nothing of the first tile.
        pytest.param(
            PrefillVariant("float16", 64, 4, 16, None, True), ((70, 90),), 33,
            marks=pytest.mark.slow,
        ),
        (PrefillVariant("bfloat16", 128, 4, 16, None, True), ((20, 60),), 7),
        (PrefillVariant("float16", 96, 5, 32, None, True), ((14, 63), (0, 0)), 1),
        (PrefillVariant("float32", 64, 4, 16, None, True), ((6, 70), (0, 9)), 34),
        (PrefillVariant("float32", 96, 9, 32, None, True), ((2, 67),), 33),  # one token a tile
        (PrefillVariant("float32", 128, 2, 16, None, True), ((20, 40),), 3),
        (PrefillVariant("bfloat16", 64, 3, 16, "float8", True), ((2, 150), (1, 5)), 70),
        (PrefillVariant("float16", 96, 5, 32, "int8", True), ((14, 63),), 9),
        (PrefillVariant("bfloat16", 128, 4, 16, "int8", True), ((3, 70),), 31),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)  # fmt: skip
def test_prefill_attention_with_a_window_equals_the_specification(variant, rows, window):
    case = attention_prefill.draw_case(variant, rows, window=window, num_kv_heads=1)

    assert case.faults(simulate(case)) == []


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("bfloat16", None),
        ("float32", None),
        pytest.param("float16", "int8", marks=pytest.mark.slow),
    ],
)
def test_rows_within_the_window_have_the_bits_of_prefill_attention_without_one(dtype, kv_dtype):
    variant, rows = PrefillVariant(dtype, 64, 2, 16, kv_dtype, True), ((5, 70), (3, 3))
    case = attention_prefill.draw_case(variant, rows, window=70, num_kv_heads=1)
    plain = attention_prefill.draw_case(without_window(variant), rows, num_kv_heads=1)

    np.testing.assert_array_equal(simulate(case)["out"], simulate(plain)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "rows", "window"),
    [
        # A chunk alone begins behind a tile of keys that others begin with.
        (PrefillVariant("bfloat16", 64, 2, 16, None, True), ((34, 140), (1, 3)), 60),
        (PrefillVariant("float32", 64, 4, 16, None, True), ((7, 70), (1, 3)), 34),
        pytest.param(
            PrefillVariant("float16", 128, 4, 32, "int8", True), ((40, 75), (1, 3)), 9,
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)  # fmt: skip
def test_bits_of_prefill_attention_do_not_depend_on_chunks_other_rows_or_the_tile_list(
    variant, rows, window
):
    case = attention_prefill.draw_case(variant, rows, window=window, num_kv_heads=1, alone=(0, 2))
    alone, select = case.part
    backwards = dataclasses.replace(
        case,
        arrays={
            **case.arrays,
            "tile_rows": case.arrays["tile_rows"][::-1].copy(),
            "tile_tokens": case.arrays["tile_tokens"][::-1].copy(),
        },
    )

    together = simulate(case, seed=1)

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], select(together)["out"])
    np.testing.assert_array_equal(simulate(backwards, seed=3)["out"], together["out"])
