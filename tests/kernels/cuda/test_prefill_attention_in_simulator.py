"""The prefill attention kernels' own source, run thread by thread against the specification."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.cases.attention_prefill import draw_case, make_case
from bench.gpu.cases.block_pool import LAYER, draw_pool
from kernels.cuda.attention_prefill import PrefillVariant
from tests.kernels.cuda.simulation import simulate


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        (PrefillVariant("bfloat16", 64, 3, 16), ((2, 70), (0, 5), (1, 1), (11, 11))),
        (PrefillVariant("bfloat16", 128, 4, 16), ((3, 34),)),
        (PrefillVariant("float16", 96, 5, 32), ((14, 33), (0, 0))),
        pytest.param(  # 8 tokens a tile
            PrefillVariant("float16", 128, 16, 32), ((9, 9),), marks=pytest.mark.slow
        ),
        (PrefillVariant("float32", 64, 4, 16), ((2, 34), (0, 9))),
        (PrefillVariant("float32", 96, 9, 32), ((1, 3),)),  # one token a tile
        (PrefillVariant("bfloat16", 64, 3, 16, "float8"), ((2, 70), (0, 5))),
        (PrefillVariant("float16", 96, 5, 32, "int8"), ((14, 33),)),
        (PrefillVariant("bfloat16", 128, 4, 16, "int8"), ((3, 34),)),
        # Of 256: blocks of two tiles of keys, rows over more than two, places left over.
        (PrefillVariant("bfloat16", 256, 5, 32), ((26, 55), (0, 3))),
        (PrefillVariant("float16", 256, 4, 32, "float8"), ((4, 40),)),
        (PrefillVariant("float32", 256, 5, 32), ((3, 37),)),
    ],
    ids=lambda value: getattr(value, "name", None) or "rows",
)
def test_prefill_attention_equals_the_specification(variant, rows):
    case = draw_case(variant, rows, num_kv_heads=1)

    assert case.faults(simulate(case)) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        (PrefillVariant("bfloat16", 64, 2, 16), ((17, 34), (1, 3))),
        (PrefillVariant("bfloat16", 256, 8, 32), ((5, 40), (1, 3))),
        pytest.param(
            PrefillVariant("float32", 256, 4, 16), ((4, 20), (1, 3)), marks=pytest.mark.slow
        ),
        pytest.param(
            PrefillVariant("float32", 64, 4, 16), ((5, 7), (1, 3)), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: getattr(value, "name", None) or "rows",
)
def test_bits_do_not_depend_on_chunks_other_rows_the_tile_list_or_the_order_of_threads(
    variant, rows
):
    # The last query tokens alone: in other places of a tile, which begins elsewhere.
    case = draw_case(variant, rows, num_kv_heads=1, alone=(0, 2))
    assert case.part is not None
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


@pytest.mark.wide
@pytest.mark.parametrize("head_size", [64, 256])  # tiles of keys of two blocks, and of half a one
def test_bits_do_not_depend_on_the_block_size(head_size):
    rng = np.random.default_rng(0)
    coarse = draw_pool(rng, "bfloat16", [41], num_kv_heads=1, block_size=32, head_size=head_size)
    # The same tokens in half blocks.
    halves = np.stack(np.split(coarse.pool, 2, axis=4), axis=1)
    tables = np.stack([2 * coarse.tables, 2 * coarse.tables + 1], axis=-1).reshape(1, -1)
    fine = dataclasses.replace(coarse, pool=halves.reshape(-1, *halves.shape[2:]), tables=tables)
    query = rng.standard_normal((3, 3, head_size)).astype(np.float32)
    stored = (query.view(np.uint32) >> 16).astype(np.uint16)
    query_lens = np.array([3], np.int32)

    in_32, in_16 = (
        simulate(
            make_case(PrefillVariant("bfloat16", head_size, 2, size), stored, query_lens, pool)
        )
        for size, pool in ((32, coarse), (16, fine))
    )

    np.testing.assert_array_equal(in_16["out"], in_32["out"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_that_a_row_owns_reaches_its_output_and_no_other(dtype):
    variant = PrefillVariant(dtype, 64, 2, 16)
    case = draw_case(variant, ((2, 4), (2, 4)), num_kv_heads=1)
    tables = case.arrays["block_tables"]
    nan = np.nan if dtype == "float32" else 0x7FFF
    case.arrays["pool"][tables[1, 0], LAYER, 0, 0, 0] = nan  # the first key of row 1

    out = simulate(case)["out"]

    is_nan = np.isnan(out) if dtype == "float32" else (out & 0x7F80) == 0x7F80
    assert not is_nan[:2].any()
    assert is_nan[2:].all()
