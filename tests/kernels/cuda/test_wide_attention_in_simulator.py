"""Attention with heads of 512 elements, thread by thread: right, and bits of a row alone.

Chunks are shortened to four tiles, 64 tokens, so that short rows have several.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case, poison, to_stored
from bench.gpu.cases.attention_decode import draw_case as draw_decode
from bench.gpu.cases.attention_decode import make_case as decode_case
from bench.gpu.cases.attention_prefill import draw_case as draw_prefill
from bench.gpu.cases.block_pool import LAYER, draw_pool
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import MAX_TILES, PrefillVariant
from kernels.cuda.attention_variant import BLOCK_SIZES, DTYPES
from kernels.cuda.attention_wide import MOST_GROUP, WideDecodeVariant, WidePrefillVariant
from kernels.cuda.errors import UnsupportedVariantError
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")

DECODE = WideDecodeVariant("bfloat16", 512, 2, 16)
DECODE_FLOAT32 = WideDecodeVariant("float32", 512, 2, 16)
PREFILL = WidePrefillVariant("bfloat16", 512, 8, 16)
PREFILL_FLOAT32 = WidePrefillVariant("float32", 512, 3, 16)
BLOCK_STRIDE, WINDOW = -6, -3
"""Where they stand among the arguments, from the end."""


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "seq_lens", "splits"),
    [
        # An empty row and one of a token; groups of one tile of eight heads and of two; shared
        # blocks; in float32 groups of one part and of more.
        (WideDecodeVariant("bfloat16", 512, 8, 16), (1, 0, 67), 2),
        (WideDecodeVariant("float16", 512, 16, 32), (19, 0), 1),
        (WideDecodeVariant("float32", 512, 5, 32), (17, 0), 1),
        (WideDecodeVariant("float16", 512, 1, 16), (33, 66, 16), 2),
        (WideDecodeVariant("bfloat16", 512, 9, 32), (35, 33), 1),
        (WideDecodeVariant("bfloat16", 512, 12, 32), (133, 129, 64), 3),
        (WideDecodeVariant("float32", 512, 1, 16), (0, 69, 15), 2),
        (WideDecodeVariant("float32", 512, 16, 16), (20,), 1),
        (WideDecodeVariant("float32", 512, 4, 16), (133, 129, 64), 3),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_decode_equals_the_specification(variant, seq_lens, splits):
    case = draw_decode(variant, seq_lens, splits=splits, num_kv_heads=1 + (len(seq_lens) < 3))

    assert case.faults(simulate(case)) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        # A tile of tokens and a part of one, behind a prefix; a row without queries; one token.
        (WidePrefillVariant("bfloat16", 512, 8, 16), ((5, 20), (1, 1))),
        (WidePrefillVariant("float16", 512, 16, 32), ((3, 35), (0, 5))),
        (WidePrefillVariant("float32", 512, 5, 32), ((2, 18), (1, 1))),
        (WidePrefillVariant("bfloat16", 512, 3, 32), ((11, 40),)),
        (WidePrefillVariant("float16", 512, 1, 32), ((33, 40), (0, 0), (2, 66))),
        (WidePrefillVariant("bfloat16", 512, 12, 16), ((5, 36), (4, 4), (3, 3))),
        (WidePrefillVariant("float32", 512, 2, 16), ((3, 9), (1, 1))),
        (WidePrefillVariant("float32", 512, 16, 32), ((2, 35), (0, 33))),
        (WidePrefillVariant("float32", 512, 1, 16), ((9, 9), (5, 72))),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_prompts_equal_the_specification(variant, rows):
    case = draw_prefill(variant, rows, num_kv_heads=1 + (variant.group in (8, 12)))

    assert case.faults(simulate(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WideDecodeVariant, WidePrefillVariant])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("group", range(1, MOST_GROUP + 1))
def test_every_variant_equals_the_specification(kind, dtype, block_size, group):
    variant = kind(dtype, 512, group, block_size)
    if kind is WideDecodeVariant:
        lengths = (65, 0, block_size - 1)
        case = draw_decode(variant, lengths, num_kv_heads=1, seed=group, splits=1 + group % 3)
    else:
        rows = ((variant.tile_tokens + 1, variant.tile_tokens + 40), (0, 20), (2, 69))
        case = draw_prefill(variant, rows, num_kv_heads=1, seed=group)

    assert case.faults(simulate(case, seed=group)) == []


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [DECODE, WideDecodeVariant("float16", 512, 9, 16), DECODE_FLOAT32],
    ids=lambda one: one.name,
)
def test_a_rows_bits_do_not_depend_on_its_neighbours_the_splits_or_the_order_of_threads(variant):
    # In float32 one head's second chunk has the larger peak: else nothing is rounded in its merge.
    case = draw_decode(variant, (69, 3), num_kv_heads=1, alone=0, splits_alone=2, seed=6)
    assert case.part is not None
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [DECODE, pytest.param(DECODE_FLOAT32, marks=pytest.mark.slow)],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize(
    ("splits", "split_rows"), [(2, 3), (5, None), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_whole_rows_behind_split_ones_have_their_bits_as_well(variant, splits, split_rows):
    # More chunks than the merge reads at a time, none, one; fewer than blocks of threads.
    lengths = (261, 0, 129, 16, 69)
    whole = draw_decode(variant, lengths, num_kv_heads=1)
    parted = draw_decode(variant, lengths, num_kv_heads=1, splits=splits, split_rows=split_rows)

    outputs = simulate(parted, seed=1)

    assert parted.faults(outputs) == []
    np.testing.assert_array_equal(outputs["out"], simulate(whole)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "chunk"),
    [
        (PREFILL, 2),  # of 6 tokens, in tiles of 4 and 2
        pytest.param(PREFILL_FLOAT32, 2, marks=pytest.mark.wide),
        pytest.param(WidePrefillVariant("float16", 512, 3, 32), 5, marks=pytest.mark.wide),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_a_tokens_bits_do_not_depend_on_its_neighbours_or_where_a_prompt_is_cut(variant, chunk):
    rows = ((3 * chunk, 4 * chunk + 9), (1, 2))
    case = draw_prefill(variant, rows, num_kv_heads=1, alone=(0, chunk))
    assert case.part is not None
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
    coarse = draw_pool(rng, variant.dtype, (43,), num_kv_heads=1, block_size=32, head_size=512)
    halves = np.stack(np.split(coarse.pool, 2, axis=4), axis=1)
    tables = np.stack([2 * coarse.tables, 2 * coarse.tables + 1], axis=-1).reshape(1, -1)
    fine = dataclasses.replace(coarse, pool=halves.reshape(-1, *halves.shape[2:]), tables=tables)
    query = to_stored(variant.dtype, rng.standard_normal((1, 3, 512)))

    of_large = simulate(decode_case(large, query, coarse))
    of_small = simulate(decode_case(variant, query, fine))

    np.testing.assert_array_equal(of_small["out"], of_large["out"])


def crowded(case: Case, behind: int) -> Case:
    """Return the case with something else behind the layers of each block, and some window."""
    pool = case.arrays["pool"]
    others = poison("float32" if pool.dtype == np.float32 else "bfloat16", (len(pool), behind))
    blocks = np.concatenate([pool.reshape(len(pool), -1), others], axis=1)
    (launch,) = case.launches
    arguments = list(launch.arguments)
    assert arguments[BLOCK_STRIDE] == pool[0].size
    arguments[BLOCK_STRIDE], arguments[WINDOW] = blocks.shape[1], 3
    return dataclasses.replace(
        case,
        arrays={**case.arrays, "pool": blocks},
        launches=(dataclasses.replace(launch, arguments=tuple(arguments)),),
    )


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant", [DECODE, PREFILL, DECODE_FLOAT32, PREFILL_FLOAT32], ids=lambda one: one.name
)
def test_blocks_may_hold_something_else_and_windows_are_not_looked_at(variant):
    if isinstance(variant, WideDecodeVariant):
        case = draw_decode(variant, (20, 33), num_kv_heads=1)
    else:
        case = draw_prefill(variant, ((3, 20), (2, 33)), num_kv_heads=1)

    assert case.faults(simulate(crowded(case, 136))) == []


@pytest.mark.parametrize("token", [20, 28])
def test_one_score_far_above_all_before_it_is_followed_in_either_half_of_a_tile(token):
    # The tile is not the first, and two to the power of that score is no float32.
    rng = np.random.default_rng(0)
    pool = draw_pool(rng, "bfloat16", (32,), num_kv_heads=1, block_size=16, head_size=512)
    query = to_stored("bfloat16", rng.standard_normal((1, 3, 512)))
    signs = np.where(query[0, 1] < 0x8000, 0x42C8, 0xC2C8)  # 100 times those of the second head
    pool.pool[pool.tables[0, token // 16], LAYER, 0, 0, token % 16] = signs
    case = decode_case(DECODE, query, pool)

    assert case.faults(simulate(case)) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", [DECODE, DECODE_FLOAT32], ids=lambda one: one.name)
@pytest.mark.parametrize("of_values", [0, 1])
def test_nan_that_a_row_owns_reaches_its_output_and_no_other(variant, of_values):
    case = draw_decode(variant, (4, 4), num_kv_heads=1)
    nan = np.nan if variant.is_float32 else 0x7FFF
    of_row = case.arrays["pool"][case.arrays["block_tables"][1, 0], LAYER, of_values, 0]
    of_row[3] = nan  # its last token

    out = simulate(case)["out"]

    is_nan = np.isnan(out) if variant.is_float32 else (out & 0x7FFF) > 0x7F80
    assert not is_nan[0].any()
    assert is_nan[1].all()


def test_whoever_launches_other_attention_launches_these():
    for kind, other in ((WideDecodeVariant, DecodeVariant), (WidePrefillVariant, PrefillVariant)):
        for dtype in DTYPES:
            assert kind(dtype, 512, 4, 16).arguments == other(dtype, 128, 4, 16).arguments
            assert kind(dtype, 512, 4, 16).threads == 128


def test_the_plan_splits_few_long_rows_and_holds_what_their_chunks_leave(monkeypatch):
    monkeypatch.undo()
    variant = WideDecodeVariant("bfloat16", 512, 8, 16)
    plan = variant.plan(1, 4, 32768, 132)
    assert plan.grid == (4, plan.splits, 1)
    assert plan.split_rows == 1
    assert plan.splits >= 32
    # 64 chunks of each kv head: eight places of 512 sums, a peak and a mass of each thread.
    assert plan.num_partials == 4 * 64 * (8 * 512 + 2 * 128)
    assert variant.plan(495, 4, 16384, 132).grid == (4, 1, 495)  # five waves
    assert variant.plan(4, 4, 0, 132).num_partials == 0
    of_nine = WideDecodeVariant("bfloat16", 512, 9, 16)
    assert of_nine.plan_of(3, 2, 100, 2, 1).num_partials == 2 * (16 * 512 + 4 * 128)
    assert of_nine.plan_of(5, 3, 100, 2, 3).grid == (3, 2, 4)
    assert WideDecodeVariant("float32", 512, 6, 16).plan_of(2, 3, 9).grid == (6, 1, 2)


def test_query_tiles_have_as_many_tokens_as_their_heads_leave_places_for():
    def tile(dtype: str, group: int) -> tuple[int, tuple[int, int, int]]:
        variant = WidePrefillVariant(dtype, 512, group, 16)
        return variant.tile_tokens, variant.grid(2, MAX_TILES + 7)

    many = MAX_TILES + 7  # of four tokens each a prompt of a quarter million
    assert [tile("bfloat16", group) for group in (1, 3, 8, 16)] == [
        (32, (many, 2, 1)), (10, (many, 2, 1)), (4, (many, 2, 1)), (2, (many, 2, 1)),
    ]  # fmt: skip
    assert [tile("float32", group) for group in (1, 3, 4, 5, 16)] == [
        (4, (many, 2, 1)), (1, (many, 2, 1)), (1, (many, 2, 1)), (1, (many, 4, 1)),
        (1, (many, 8, 1)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8", 512, 1, 16), "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        (("float32", 256, 1, 16), "head_size must be one of 512, got 256"),
        (("float32", 512, 0, 16), "group must be between 1 and 16, got 0"),
        (("bfloat16", 512, 17, 16), "group must be between 1 and 16, got 17"),
        (("float32", 512, 1, 8), "block_size must be one of 16, 32, got 8"),
        (("bfloat16", 512, 1, 16, "int8"), "kv_dtype must be the model's own at head_size 512"),
        (("bfloat16", 512, 1, 16, None, True), "has_window must be False at head_size 512"),
        (("bfloat16", 512, 1, 16, None, False, True), "has_sinks must be False at head_size 512"),
        (
            ("bfloat16", 512, 1, 16, None, False, False, True),
            "has_cap must be False at head_size 512",
        ),
    ],
)
@pytest.mark.parametrize("kind", [WideDecodeVariant, WidePrefillVariant])
def test_a_shape_no_kernel_is_written_for_is_refused_by_name(kind, arguments, message):
    with pytest.raises(UnsupportedVariantError, match=message) as refused:
        kind(*arguments)
    assert refused.value.field == message.split()[0]
