"""The prefill attention kernels' own source, run thread by thread against the specification."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest

from bench.gpu.cases.attention_prefill import draw_case, make_case
from bench.gpu.cases.block_pool import LAYER, draw_pool
from kernels.cuda import attention_prefill_pool
from kernels.cuda.attention_partials import DTYPES, HEAD_SIZES, MAX_GROUP
from kernels.cuda.attention_prefill import BLOCK_SIZES, PrefillVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_kv import QUANTIZED_DTYPES
from tests.kernels.cuda.simulation import simulate
from tests.simt.memory import SharedArray


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
    ],
    ids=lambda value: getattr(value, "name", None) or "rows",
)
def test_prefill_attention_equals_the_specification(variant, rows):
    case = draw_case(variant, rows, num_kv_heads=1)

    assert case.faults(simulate(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("group", range(1, MAX_GROUP + 1))
def test_every_variant_equals_the_specification(dtype, head_size, group, block_size):
    check_variant(PrefillVariant(dtype, head_size, group, block_size))


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("group", range(1, MAX_GROUP + 1))
def test_every_group_equals_the_specification_in_eight_bits(kv_dtype, head_size, group):
    # The model's dtype and the block size take turns.
    dtype = ("bfloat16", "float16")[(group + head_size // 32) % 2]
    check_variant(PrefillVariant(dtype, head_size, group, BLOCK_SIZES[group // 2 % 2], kv_dtype))


def check_variant(variant):
    """A row over two tiles and more, one without queries, two tokens over three tiles of keys."""
    rows = ((variant.tile_tokens + 1, variant.tile_tokens + 40), (0, 20), (2, 69))
    case = draw_case(variant, rows, num_kv_heads=1, seed=variant.group)

    assert case.faults(simulate(case, seed=variant.group)) == []


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        (PrefillVariant("bfloat16", 64, 2, 16), ((17, 34), (1, 3))),
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


def test_bits_do_not_depend_on_the_block_size():
    rng = np.random.default_rng(0)
    coarse = draw_pool(rng, "bfloat16", [41], num_kv_heads=1, block_size=32, head_size=64)
    # The same tokens in half blocks.
    halves = np.stack(np.split(coarse.pool, 2, axis=4), axis=1)
    tables = np.stack([2 * coarse.tables, 2 * coarse.tables + 1], axis=-1).reshape(1, -1)
    fine = dataclasses.replace(coarse, pool=halves.reshape(-1, *halves.shape[2:]), tables=tables)
    query = rng.standard_normal((3, 3, 64)).astype(np.float32)
    stored = (query.view(np.uint32) >> 16).astype(np.uint16)
    query_lens = np.array([3], np.int32)

    in_32, in_16 = (
        simulate(make_case(PrefillVariant("bfloat16", 64, 2, size), stored, query_lens, pool))
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


@pytest.fixture
def accesses(monkeypatch):
    """Elements of 16-byte accesses to shared memory: by kind and warp, a list for each lane."""
    recorded: dict = defaultdict(lambda: [[] for _ in range(32)])

    def record(name):
        original = getattr(SharedArray, name)

        def recording(self, element, other):
            thread = self._current()
            num_words = other if isinstance(other, int) else len(other)
            if thread.block.index.y == 0 and num_words == 4:
                byte = int(element) * self._flat.itemsize
                recorded[name, thread.warp][thread.lane].append((id(self), byte))
            return original(self, element, other)

        monkeypatch.setattr(SharedArray, name, recording)

    record("read_words")
    record("start_copy")
    return recorded


@pytest.mark.parametrize(
    ("dtype", "head_size", "kv_dtype"),
    [
        ("bfloat16", 64, None),
        ("bfloat16", 96, None),
        ("bfloat16", 128, None),
        ("float32", 96, None),
        ("bfloat16", 64, "int8"),
        ("bfloat16", 96, "int8"),
        pytest.param("bfloat16", 128, "int8", marks=pytest.mark.slow),
    ],
)
def test_no_two_lanes_of_a_wide_access_meet_in_a_bank(dtype, head_size, kv_dtype, accesses):
    variant = PrefillVariant(dtype, head_size, 4, 16, kv_dtype)
    case = draw_case(variant, ((1, 20),), num_kv_heads=1)

    simulate(case)

    assert {name for name, _ in accesses} == {"read_words", "start_copy"}
    assert count_conflicts(accesses) == 0


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(
    ("table", "kv_dtype"),
    [("SWIZZLES", None), pytest.param("SWIZZLES_8_BITS", "int8", marks=pytest.mark.slow)],
)
def test_without_the_swizzle_lanes_meet_in_banks(head_size, table, kv_dtype, accesses, monkeypatch):
    monkeypatch.setitem(getattr(attention_prefill_pool, table), head_size, (0, 0))
    variant = PrefillVariant("bfloat16", head_size, 4, 16, kv_dtype)
    case = draw_case(variant, ((1, 20),), num_kv_heads=1)

    outputs = simulate(case)

    assert case.faults(outputs) == []
    assert count_conflicts(accesses) > 0


def count_conflicts(accesses) -> int:
    """Return how many lanes have to wait because another of their eight takes the same banks."""
    conflicts = 0
    for lanes in accesses.values():
        lists = [places for places in lanes if places]  # some lanes may have nothing to copy
        for together in zip(*lists, strict=True):
            for first in range(0, len(together), 8):  # the lanes that are served at a time
                places = set(together[first : first + 8])  # the same place is read once for all
                conflicts += len(places) - len({byte // 16 % 8 for _, byte in places})
    return conflicts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8", 64, 1, 16), "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        (("float32", 80, 1, 16), "head_size must be one of 64, 96, 128, got 80"),
        (("float32", 64, 0, 16), "group must be between 1 and 16, got 0"),
        (("float32", 64, 17, 16), "group must be between 1 and 16, got 17"),
        (("float32", 64, 1, 8), "block_size must be one of 16, 32, got 8"),
    ],
)
def test_a_shape_the_kernel_is_not_written_for_is_refused_by_name(arguments, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        PrefillVariant(*arguments)
