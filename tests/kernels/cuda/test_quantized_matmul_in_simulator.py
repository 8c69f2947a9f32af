"""Products with quantised weights, run thread by thread against the specification, and broken."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import numpy as np
import pytest

from bench.gpu.case import Case, to_float64
from bench.gpu.cases.quantized_matmul import COLUMNS_BEHIND, draw_case, draw_cases
from bench.gpu.numerics import check_case
from kernels.cuda import (
    quantized_matmul,
    quantized_matmul_tensor,
    quantized_operands,
    quantized_sums,
)
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_formats import FORMATS, TILE_INPUTS
from kernels.cuda.quantized_layout import pack_matrix
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.cuda.quantized_strands import columns_of, strand_bits_of
from tests.kernels.cuda.simulation import Kernel, Source, Sources, simulate
from tests.simt import Fault, OutOfBounds, Race

PRECISION = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-16}  # of one rounding, relative


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "which"),
    [
        (QuantizedMatmulVariant("Q4_1", "float16", 32), 1),
        (QuantizedMatmulVariant("Q8_0", "bfloat16", 16, writes_float32=True), 0),
        (QuantizedMatmulVariant("Q4_Z_G128", "float16", 8), 1),
        (QuantizedMatmulVariant("Q4_0", "bfloat16", 8, gates=True), 1),
        (QuantizedMatmulVariant("Q8_0", "float16", 16, gates=True, activation="gelu"), 1),
        (QuantizedMatmulVariant("MXFP4", "bfloat16", 8), 0),
        (QuantizedMatmulVariant("MXFP4", "float16", 16), 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_product_is_right_and_a_rows_bits_are_those_it_has_alone(variant, which):
    case = draw_cases(variant, 0)[which]
    out = simulate(case)

    assert case.faults(out) == []
    # Nothing but the last rounding and sums in float32: far closer than the tolerance.
    exact = case.expected["out"].values[:, :-COLUMNS_BEHIND]
    error = np.abs(to_float64(variant.out_dtype, out["out"])[:, :-COLUMNS_BEHIND] - exact)
    assert (error <= PRECISION[variant.out_dtype] * np.abs(exact) + 1e-5).all()
    assert case.part is not None
    alone, select = case.part
    np.testing.assert_array_equal(simulate(alone, seed=1)["out"], select(out)["out"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [variant for variant in quantized_matmul.variants(every=True) if not variant.of_experts],
    ids=lambda variant: variant.name,
)
def test_every_product_is_right(variant):
    for case in draw_cases(variant, 2):
        assert check_case(case, simulate).faults == ()


def run_by(case: Case, columns: int, seed: int) -> np.ndarray:
    """Return the output of a case's arrays by the variant for so many rows."""
    (one,) = case.launches
    variant = dataclasses.replace(one.variant, columns=columns)
    scalars = one.arguments[3:]
    launch = dataclasses.replace(one, variant=variant, grid=variant.grid(*scalars[:4]))
    return simulate(dataclasses.replace(case, launches=(launch,)), seed=seed)["out"]


@pytest.mark.parametrize(
    "weights",
    [
        "Q4_Z_G128",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS if name != "Q4_Z_G128"),
    ],
)
def test_every_variant_gives_the_same_bits(weights):
    variant = QuantizedMatmulVariant(weights, "bfloat16", 16)
    num_units = 1 + 8 * TILE_INPUTS // FORMATS[weights].unit
    case = draw_case(variant, 9, 24, num_units, 0, alone=0)

    first, *others = [run_by(case, columns, seed) for seed, columns in enumerate((8, 16, 32))]

    for other in others:
        np.testing.assert_array_equal(other, first)


def test_a_row_that_holds_nan_and_infinity_spoils_no_other():
    variant = QuantizedMatmulVariant("Q4_0", "bfloat16", 8)
    case = draw_case(variant, 3, 20, 3, 3, alone=1)
    clean = simulate(case)["out"]
    case.arrays["x"][1, 70] = 0x7FFF  # NaN
    case.arrays["x"][0, 5] = 0x7F80  # infinity

    out = simulate(case)["out"]

    assert np.isnan(to_float64("bfloat16", out[1])).all()
    assert not np.isfinite(to_float64("bfloat16", out[0])).any()
    np.testing.assert_array_equal(out[2], clean[2])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("exponent", "expected"), [(0, 0.0), (1, 2.0**-126), (254, 2.0**127), (255, np.nan)]
)
def test_scales_of_floats_reach_as_far_as_their_bytes(exponent, expected):
    """Of 0 they are zero, of 255 no numbers: rows are one, and so is one weight of each."""
    case = draw_case(FLOATS, 2, 32, 1, 0, alone=0)
    fmt = FORMATS["MXFP4"]
    case.arrays["x"][:] = 0
    case.arrays["x"][:, 3] = 0x3F80
    matrix = QuantizedMatrix(np.full((32, 32), 2, np.int8), np.ones((32, 1), np.float32))
    packed = pack_matrix("MXFP4", matrix)
    packed[fmt.scales_at(32) : fmt.scales_at(32) + fmt.span_bytes] = exponent
    case.arrays["packed"] = packed

    found = to_float64("bfloat16", simulate(case)["out"][:, :32])

    if np.isnan(expected):
        assert not np.isfinite(found).any()
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("num_outputs", "strands"),
    [(1, 8), (4096, 8), (6144, 8), (14336, 4), (28672, 2), (49152, 2), (128256, 1)],
)
def test_the_fewest_strands_that_fill_the_device(num_outputs, strands):
    assert 1 << strand_bits_of(num_outputs) == strands


def test_the_variant_for_some_rows_is_the_smallest_that_holds_them():
    assert [columns_of(rows) for rows in (1, 8, 9, 16, 17, 32, 64)] == [8, 8, 16, 16, 32, 32, 32]


MINIMA = QuantizedMatmulVariant("Q4_1", "bfloat16", 16)
BYTES = QuantizedMatmulVariant("Q8_0", "bfloat16", 16)
ZEROS = QuantizedMatmulVariant("Q4_Z_G64", "bfloat16", 8)
FLOATS = QuantizedMatmulVariant("MXFP4", "bfloat16", 8)
ZERO_BYTES = QuantizedMatmulVariant("Q8_Z", "float16", 8)
GATES = QuantizedMatmulVariant("Q8_0", "bfloat16", 8, gates=True)


def source_of(variant: QuantizedMatmulVariant, library: ModuleType | None = None) -> Source:
    return Source(quantized_matmul_tensor, "make_quantized_matmul", variant, library)


SOURCES = {
    variant: Sources(
        source_of(variant),
        source_of(variant, quantized_sums),
        source_of(variant, quantized_operands),
    )
    for variant in (MINIMA, BYTES, ZEROS, ZERO_BYTES, FLOATS, GATES)
}


def narrow_case(variant: QuantizedMatmulVariant) -> Case:
    """Two strands and a panel, in a block of four panels; nothing fills its tiles."""
    return draw_case(variant, variant.columns - 5, 20, 3, 1, alone=0)


def long_case(variant: QuantizedMatmulVariant) -> Case:
    """One strand that fills its ring twice and starts anew."""
    return draw_case(variant, 3, 20, 2 * variant.round_units + 1, 0, alone=0)


def test_there_is_one_barrier_and_it_can_not_be_left_out():
    case, source = narrow_case(MINIMA), source_of(MINIMA, quantized_sums)
    (barrier,) = source.synchronisations()

    for same in (case, long_case(MINIMA)):
        assert same.faults(simulate(same, kernels=source.unbroken())) == []
    for seed in range(2):
        with pytest.raises(Race, match="shared memory"):
            simulate(case, kernels=source.without(barrier), seed=seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if tile < tiles_left:", "if True:"),
        ("if panel * panel_outputs >= num_outputs:", "if False:"),
        ("min(first_row + 8 * c + group, end_row - 1)", "first_row + 8 * c + group"),
        ("if row < end_row and output", "if output"),
        ("row < end_row and output < outputs_of_lane", "row < end_row"),
    ],
)
def test_what_lies_outside_an_array_is_not_touched_unnoticed(old, new):
    with pytest.raises((OutOfBounds, Race)):  # Race: behind a row of y is the next one's first
        simulate(narrow_case(MINIMA), kernels=SOURCES[MINIMA].with_replaced(old, new))


BREAKAGES = [
    (BYTES, "place = at + v * VECTOR_BYTES", "place = at"),
    (MINIMA, "word = weights[first_weights, 2 * t + h]",
     "word = weights[first_weights, 2 * t]"),
    (BYTES, "(pairs[0, j], pairs[1, j], pairs", "(pairs[1, j], pairs[0, j], pairs"),
    (BYTES, "sums[i, j] = float32(0)", "pass"),
    (MINIMA, "minima[row], input_sums[c, j], total", "minima[row], input_sums[c, 0], total"),
    (ZEROS, "word = word >> uint32(group % 2 * 16)", "pass"),
    (ZERO_BYTES, "first, second, zeros[0, 2 * t + h])", "first, second, zeros[0, h])"),
    (BYTES, "* strand_units\n", "* 0\n"),
    (BYTES, "value += strand_sums[uint32(at)]", "value = strand_sums[uint32(at)]"),
]  # fmt: skip
MORE_BREAKAGES = [
    (BYTES, "weights[v, 2 * h], weights[v, 2 * h + 1]", "weights[v, 2 * h], weights[v, 2 * h]"),
    (BYTES, "load_scales(scale_words, span, packed, at + group * group_bytes)",
     "load_scales(scale_words, span, packed, at)"),
    (BYTES, "sums, t * column_tiles + c, a, b)",
     "sums, t * column_tiles + c, a, (b[1], b[0]))"),
    (BYTES, "row = 2 * t + j // 2", "row = 2 * t"),
    (BYTES, "scales[2 * half], scales[2 * half + 1] = low(word), high(word)",
     "scales[2 * half], scales[2 * half + 1] = high(word), low(word)"),
    (MINIMA, "input_sums[c, j] = float32(0)", "pass"),
    (ZEROS, "(group if is_bytes else group // 2) * 4", "group // 4 * 4"),
    (FLOATS, "byte = scale_words[slot, 0] >> uint32(8 * i)", "byte = scale_words[slot, 0]"),
    (ZEROS, "widen_nibbles_less(pairs, h, word, zeros[0, 2 * t + h])",
     "widen_nibbles_less(pairs, h, word, zeros[0, 2 * t])"),
    (ZERO_BYTES, "(group if is_bytes else group // 2) * 4", "group // 2 * 4"),
    (ZERO_BYTES, "place = at + zeros_at", "place = at"),
    (BYTES, "(8 * c + j % 2) * ROW_PITCH", "8 * c * ROW_PITCH"),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_breakage_is_of_a_piece_of_the_source():
    for variant, old, _ in [*BREAKAGES, *MORE_BREAKAGES]:
        assert SOURCES[variant].count(old) == 1, old


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_a_broken_product_is_noticed(variant, old, new):
    case = narrow_case(variant)

    assert is_noticed(case, SOURCES[variant].with_replaced(old, new))


def test_a_second_panel_in_the_place_of_the_first_is_noticed():
    case = draw_case(BYTES, 3, 40, 1, 1, alone=0)

    assert case.faults(simulate(case, kernels=SOURCES[BYTES].unbroken())) == []
    assert is_noticed(case, SOURCES[BYTES].with_replaced("output += panel_outputs", "pass"))


TURNS = [
    (MINIMA, "int32(tiles_left - round_tiles)", "int32(tiles_left - 2 * round_tiles)"),
    (MINIMA, "scales_at += round_spans * span_bytes", "pass"),
    (MINIMA, "ahead = tile + input_ring", "ahead = tile + ring + 1"),
    (MINIMA, "if ahead < tiles_left:", "if False:"),
]  # fmt: skip
MORE_TURNS = [
    (MINIMA, "inputs[i, j] = uint32(0)", "pass"),
    (MINIMA, "tile_at += round_tiles * tile_bytes", "pass"),
    (MINIMA, "inputs_at[c] += round_tiles * TILE_INPUTS", "pass"),
    (MINIMA, "at = tile_at + ahead * tile_bytes", "at = tile_at + (ahead - 1) * tile_bytes"),
    (MINIMA, "at = scales_at + next_span * span_bytes + group",
     "at = scales_at + span * span_bytes + group"),
    (ZEROS, "ask_for_zeros(zero_words, slot, packed, at, group)\n                for",
     "pass\n                for"),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_turn_is_of_a_piece_of_the_source():
    for variant, old, _ in [*TURNS, *MORE_TURNS]:
        assert SOURCES[variant].count(old) == 1, old


@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [*TURNS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_TURNS)],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_a_ring_that_turns_wrongly_is_noticed(variant, old, new):
    case = long_case(variant)

    assert is_noticed(case, SOURCES[variant].with_replaced(old, new))


@pytest.mark.parametrize(
    "condition", ["span * span_tiles < tiles_left:", "next_span * span_tiles < tiles_left:"]
)
def test_numbers_behind_the_last_span_are_not_asked_for(condition):
    """There are those of the next panel, or what fills its line, or nothing: the array's end."""
    case, source = long_case(ZEROS), source_of(ZEROS)
    text = source.text
    assert f"if {condition}" in text
    broken = text.replace(f"if {condition}", "if True:")

    assert is_noticed(case, source.with_replaced(text, broken))


def is_noticed(case: Case, kernels: dict[str, Kernel]) -> bool:
    """Return whether broken kernels fault or give a wrong answer."""
    try:
        outputs = simulate(case, kernels=kernels)
    except Fault:
        return True
    return bool(case.faults(outputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantizedMatmulVariant("Q2_K", "bfloat16", 8), "weights must be one of Q8_0"),
        (lambda: QuantizedMatmulVariant("Q4_0", "float32", 8), "dtype must be one of bfloat16"),
        (lambda: QuantizedMatmulVariant("Q4_0", "bfloat16", 64), "columns must be one of 8, 16"),
        (lambda: MINIMA.grid(0, 32, 32, 0), "num_rows must be at least 1, got 0"),
        (lambda: MINIMA.grid(1, 0, 32, 0), "num_outputs must be at least 1, got 0"),
        (lambda: MINIMA.grid(1, 32, 48, 0), "num_inputs must be a multiple of 32, got 48"),
    ],
)  # fmt: skip
def test_a_product_the_kernel_is_not_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gated(value, other)", "value * other"),
        ("gated(value, other)", "gated(other, value)"),
        ("other += strand_sums[uint32(at + panel_outputs)]", "pass"),
        ("other = strand_sums[uint32(at + panel_outputs)]", "other = strand_sums[uint32(at)]"),
        ("outputs_of_lane = int64(0)", "pass"),
        ("place, outputs_of_lane = lane % panel_outputs", "place, outputs_of_lane = lane"),
        ("output += panel_outputs", "output += PANEL_ROWS"),
        ("output = first_panel * panel_outputs", "output = first_panel * PANEL_ROWS"),
    ],
)
def test_a_gate_that_is_not_that_of_its_output_is_noticed(old, new):
    # Five panels, four of them in the first block; two strands.
    case = draw_case(GATES, 3, 80, 2, 1, alone=0)
    assert is_noticed(case, SOURCES[GATES].with_replaced(old, new))


def test_the_unbroken_gate_is_right_on_several_panels():
    case = draw_case(GATES, 3, 80, 2, 1, alone=0)
    assert case.faults(simulate(case, kernels=SOURCES[GATES].unbroken())) == []
