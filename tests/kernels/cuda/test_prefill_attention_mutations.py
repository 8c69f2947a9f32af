"""Proof that the simulated tests notice: the kernels are broken in one place after another."""

from __future__ import annotations

import inspect

import pytest

from bench.gpu.cases.attention_prefill import draw_case
from kernels.cuda import (
    attention_prefill_float32,
    attention_prefill_pool,
    attention_prefill_tensor,
    attention_prefill_window,
)
from kernels.cuda.attention_prefill import PrefillVariant
from tests.kernels.cuda.simulation import SYNCHRONISATION, simulate
from tests.simt import Divergence, OutOfBounds, Race

BFLOAT16 = PrefillVariant("bfloat16", 64, 2, 16)
PARKED = PrefillVariant("float16", 128, 2, 16)
NARROW = PrefillVariant("float16", 96, 2, 16)
FLOAT32 = PrefillVariant("float32", 64, 2, 16)
INT8 = PrefillVariant("bfloat16", 64, 2, 16, "int8")
INT8_NARROW = PrefillVariant("float16", 96, 2, 16, "int8")
WIDE = PrefillVariant("bfloat16", 256, 3, 32)  # its blocks are of two tiles of keys
WIDE_INT8 = PrefillVariant("float16", 256, 2, 16, "int8")
WIDE_FLOAT32 = PrefillVariant("float32", 256, 3, 32)
WINDOW = PrefillVariant("bfloat16", 128, 2, 16, None, True)
WINDOW_INT8 = PrefillVariant("bfloat16", 128, 2, 16, "int8", True)
WINDOW_FLOAT32 = PrefillVariant("float32", 64, 2, 16, None, True)

MODULES = {
    "make_tensor_prefill": attention_prefill_tensor,
    "make_float32_prefill": attention_prefill_float32,
    "make_prefill_window": attention_prefill_window,
    "_make_column": attention_prefill_pool,
    "_make_multiply_rows": attention_prefill_pool,
    "_make_place": attention_prefill_pool,
    "_make_16_bits": attention_prefill_pool,
    "_make_8_bits": attention_prefill_pool,
}


KERNELS = (attention_prefill_tensor, attention_prefill_float32)
"""Modules that have some of the factories under names of their own."""


def factories_of(variant) -> list[str]:
    """Return the factories that a kernel's source is of, the kernel's own first."""
    if variant.dtype == "float32":
        return ["make_float32_prefill", "make_prefill_window"]
    shared = ["make_prefill_window", "_make_column", "_make_multiply_rows", "_make_place"]
    return ["make_tensor_prefill", *shared, "_make_8_bits" if variant.kv_dtype else "_make_16_bits"]


def source_of(factory) -> str:
    return inspect.getsource(getattr(MODULES[factory], factory))


@pytest.fixture
def remake(monkeypatch):
    """Make a factory again from a text."""

    def from_text(factory: str, text: str) -> None:
        module = MODULES[factory]
        names = dict(vars(module))
        exec(compile(text, inspect.getfile(module), "exec"), names)
        for user in (module, *KERNELS):
            if hasattr(user, factory):
                monkeypatch.setattr(user, factory, names[factory])

    return from_text


@pytest.fixture
def break_source(remake):
    """Replace a piece of a variant's factories, which must be there once."""

    def replace(variant, old: str, new: str) -> None:
        texts = {factory: source_of(factory) for factory in factories_of(variant)}
        counts = {factory: text.count(old) for factory, text in texts.items()}
        assert sum(counts.values()) == 1, f"{old!r} is in the source: {counts}"
        factory = max(counts, key=counts.__getitem__)
        remake(factory, texts[factory].replace(old, new))

    return replace


def small_case(variant):
    """A row of several tiles of keys, the last with a few."""
    row = (2, 36) if variant.dtype == "float32" else (6, 70)
    return draw_case(variant, (row,), num_kv_heads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [BFLOAT16, PARKED, NARROW, WIDE, FLOAT32, WIDE_FLOAT32, INT8, INT8_NARROW, WIDE_INT8],
    ids=lambda v: v.name,
)
def test_the_unbroken_source_passes(variant, remake):
    for factory in factories_of(variant):
        remake(factory, source_of(factory))
    case = small_case(variant)

    assert case.faults(simulate(case)) == []


def synchronisations() -> list[tuple[str, int]]:
    """Return the lines of the factories that hold a barrier, a commit or a wait."""
    return [
        (factory, number)
        for factory in MODULES
        for number, line in enumerate(source_of(factory).splitlines())
        if line.strip() in SYNCHRONISATION
    ]


def test_there_are_as_many_barriers_commits_and_waits_as_the_drawings_show():
    of_factory = [factory for factory, _ in synchronisations()]

    assert of_factory.count("make_tensor_prefill") == 3
    assert of_factory.count("make_float32_prefill") == 5
    assert len(of_factory) == 8


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("kv_dtype", "factory", "number"),
    [
        *((None, *place) for place in synchronisations()),
        *(
            pytest.param("int8", *place, marks=pytest.mark.slow)
            for place in synchronisations()
            if place[0] == "make_tensor_prefill"
        ),
    ],
)
def test_a_deleted_barrier_commit_or_wait_is_a_race_in_every_order_of_threads(
    kv_dtype, factory, number, remake
):
    lines = source_of(factory).splitlines()
    indent = len(lines[number]) - len(lines[number].lstrip())
    lines[number] = " " * indent + "pass"
    remake(factory, "\n".join(lines))
    variant = FLOAT32 if factory == "make_float32_prefill" else INT8 if kv_dtype else BFLOAT16

    for seed in range(2):
        with pytest.raises(Race, match="shared memory"):
            simulate(draw_case(variant, ((1, 66),), num_kv_heads=1), seed=seed)


@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        (BFLOAT16, "min(key, last_key) >>", "key >>"),
        (
            BFLOAT16,
            "block_tables[entry]) * block_stride",
            "block_tables[entry]) * 2 * block_stride",
        ),
        (BFLOAT16, "if row < 0:", "if row < -1:"),
        (BFLOAT16, "if token < end_token:", "if True:"),
        (BFLOAT16, "min(place // group, end_token - 1)", "place // group"),
        (FLOAT32, "if token < end_token:", "if True:"),
        (FLOAT32, "min(place // group, end_token - 1)", "place // group"),
    ],
)
def test_an_index_outside_an_array_is_out_of_bounds(variant, old, new, break_source):
    break_source(variant, old, new)

    with pytest.raises(OutOfBounds):
        simulate(draw_case(variant, ((2, 17),), num_kv_heads=1))


def test_a_weight_that_both_lanes_of_a_key_write_is_a_race(break_source):
    break_source(WIDE_FLOAT32, "if part == 0:", "if part >= 0:")

    with pytest.raises(Race, match="shared memory"):
        simulate(draw_case(WIDE_FLOAT32, ((1, 5),), num_kv_heads=1))


def test_a_product_that_some_lanes_skip_is_a_fault(break_source):
    break_source(BFLOAT16, "t >= 0 and sees(", "lane > 0 and t >= 0 and sees(")

    with pytest.raises(Divergence):
        simulate(draw_case(BFLOAT16, ((1, 5),), num_kv_heads=1))


BREAKAGES = [
    # Values behind the row's end are NaN.
    (BFLOAT16, "is_wanted = key <= last_key", "is_wanted = True"),
    (BFLOAT16, "key > position", "key > position + 1"),
    (BFLOAT16, "columns * 2 + i // 2]", "columns * 2]"),
    (PARKED, "m * parked + step - resident", "m * parked"),
    # The scale of a value behind the row's end is NaN.
    (INT8, "pool, source, is_wanted", "pool, source, True"),
    (INT8, "% 2 * 2 + i] *= scale", "% 2 * 2 + i] *= float32(1)"),
    (INT8, "scores[n, j + 1] * high", "scores[n, j + 1] * low"),
    # Keys of the first half of a block for those of the second.
    (WIDE, "int32(next_tile * keys) & (block_size - 1)", "0"),
    # What a read of keys has of the next 16 dimensions.
    (WIDE_INT8, "2 * (two + step % steps_at_once)", "2 * two"),
    (
        WIDE_FLOAT32,
        "scores[r] += cuda.shfl_xor_sync",
        "scores[r] += float32(0) * cuda.shfl_xor_sync",
    ),
    (FLOAT32, "token < seq_len", "True"),
    (FLOAT32, "key > position", "key > position + 1"),
]
MORE_BREAKAGES = [
    (BFLOAT16, "multiply(sums, m * stride + n, a, first)", "multiply(sums, n, a, first)"),
    (PARKED, "step // flips * flips * 16", "0"),
    (BFLOAT16, "- 1) > first_position", "- 1) > first_position + keys"),
    (BFLOAT16, "rises |= shrink[r] != float32(1)", "rises |= t == 0"),
    (BFLOAT16, "swizzled = vector ^ (", "swizzled = vector + 0 * ("),
    (BFLOAT16, "(lane >> 3 & 1) ^ (", "(lane >> 4) ^ ("),
    (BFLOAT16, "lane & tokens - 1", "lane & 7"),
    (BFLOAT16, "source + value_offset", "source + key_offset"),
    (BFLOAT16, "visible_keys\n\n    @cuda", "visible_keys - keys\n\n    @cuda"),
    (BFLOAT16, "top, 1 << bit", "top, 2 << bit"),
    (BFLOAT16, "a, ones)", "a, (ones[0], uint32(0)))"),
    (PARKED, "first_slot + first % block_size", "first_slot"),
    (PARKED, "peak[r] = top", "peak[r] = max(old, float32(-99))"),
    (NARROW, "2 if head_size == 96 else 4", "4"),
    (INT8, "copied_token % block_size", "0"),
    (INT8, "8 * (lane & 3))\n                    for n", "0)\n                    for n"),
    (INT8, "key_offset if number < keys else value_offset", "key_offset"),
    (INT8, "(key % block_size)", "0"),
    (INT8, "low, high, UPPER_HALVES", "low, high, LOWER_HALVES"),
    (INT8, "(pairs[0, 0], pairs[0, 2])", "(pairs[0, 0], pairs[0, 1])"),
    (INT8, "(pairs[0, 2], pairs[0, 3])", "(pairs[0, 0], pairs[0, 1])"),
    (INT8, "four * 32 * head_size", "0"),
    (INT8, "first + 16 * step + 2 * j", "first + 16 * step + 2 - 2 * j"),
    (INT8_NARROW, "96: 2, 128: 8", "96: 4, 128: 8"),
    (WIDE, "step // flips * flips * 16", "0"),
    (WIDE, "layout.row_tiles, layout.warp_rows", "layout.row_tiles, 32"),
    (WIDE_INT8, "lane >> token_bits", "lane >> 5"),
    (WIDE_INT8, "96: 2, 128: 8, 256: 8", "96: 2, 128: 8, 256: 4"),
    (WIDE_FLOAT32, "is_hidden(first_key + lane_key", "is_hidden(first_key + lane"),
    (WIDE_FLOAT32, "parts * step + part", "parts * step"),
    (WIDE_FLOAT32, "range(key_bits):\n                mass", "range(5):\n                mass"),
    (FLOAT32, "(lane & 7)", "(lane & 3)"),
    (FLOAT32, "mass[r] * shrink + weight", "mass[r] + weight"),
    (FLOAT32, "sums[r, i] *= shrink", "pass"),
    (FLOAT32, "top, 1 << bit", "top, 1"),
    (
        FLOAT32,
        "visible_keys, window):\n                for first",
        "32, window):\n                for first",
    ),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
)
def test_broken_arithmetic_gives_a_wrong_answer(variant, old, new, break_source):
    break_source(variant, old, new)
    case = small_case(variant)

    assert case.errors(simulate(case))["out"] > 2 * case.expected["out"].tolerance


def window_case(variant):
    """A row whose first tokens alone see the first tile of keys, and none its first keys."""
    row, window = ((8, 100), 34) if variant.is_float32 else ((20, 60), 20)
    return draw_case(variant, (row,), num_kv_heads=1, window=window)


WINDOW_BREAKAGES = [
    (WINDOW, "key <= int32(position - window)", "key < int32(position - window)"),
    (WINDOW, "or first_key < int32(visible_keys - window)", ""),
    (WINDOW, "NO_PEAK if has_window else MINUS_INFINITY", "MINUS_INFINITY"),
    (WINDOW, "key >= first if", "key >= first - 1 if"),
    (WINDOW_FLOAT32, "key <= int32(position - window)", "key <= int32(position - window) + 1"),
]
MORE_WINDOW_BREAKAGES = [
    (WINDOW, "int32(first_position - window) + 1", "int32(first_position - window) + 40"),
    (WINDOW_INT8, "key >= first if", "key >= first - 1 if"),
    (WINDOW_INT8, "NO_PEAK if has_window else MINUS_INFINITY", "MINUS_INFINITY"),
    (WINDOW_FLOAT32, "key >= first if", "key >= first - 1 if"),
    (WINDOW_FLOAT32, "NO_PEAK if has_window else MINUS_INFINITY", "MINUS_INFINITY"),
    (WINDOW_FLOAT32, "int32(first_position - window) + 1", "int32(first_position - window) + 9"),
    (WINDOW_FLOAT32, "seq_len, first_tile * tile_keys", "seq_len, 0"),
]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        *WINDOW_BREAKAGES,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_WINDOW_BREAKAGES),
    ],
)
def test_a_window_that_is_cut_wrongly_gives_a_wrong_answer(variant, old, new, break_source):
    case = window_case(variant)
    break_source(variant, old, new)

    assert case.errors(simulate(case))["out"] > 2 * case.expected["out"].tolerance


@pytest.mark.wide
@pytest.mark.parametrize("variant", [WINDOW, WINDOW_INT8, WINDOW_FLOAT32], ids=lambda v: v.name)
def test_the_cases_of_windows_pass_with_the_kernels_as_they_are(variant):
    case = window_case(variant)

    assert case.faults(simulate(case)) == []


@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        (WINDOW, "first_token + 1 - window", "first_token + 1 - window - keys"),
        (WINDOW, "key >= first if has_window else True", "True"),
        (WINDOW_INT8, "pool, source, is_wanted", "pool, source, key <= last_key"),  # of scales
        (WINDOW_FLOAT32, "first_token + 1 - window", "first_token + 1 - window - keys"),
        (WINDOW_FLOAT32, "key >= first if has_window else True", "True"),
    ],
)
def test_a_block_before_the_window_that_is_read_is_out_of_bounds(variant, old, new, break_source):
    break_source(variant, old, new)

    with pytest.raises(OutOfBounds):
        simulate(window_case(variant))
