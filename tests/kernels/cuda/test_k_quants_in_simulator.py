"""Weights of five and six bits and shared scales: every code and scale, unpacked too, and broken.

Products of all variants are run by `test_quantized_matmul_in_simulator`, with experts and biases
by the files of those; where everything lies by `test_k_quant_layout`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.gpu.case import Case, to_float64
from bench.gpu.cases import draw_cases
from bench.gpu.cases.quantized_matmul import COLUMNS_BEHIND, draw_case
from bench.gpu.numerics import check_case
from kernels.cuda import quantized_matmul_tensor, quantized_operands, quantized_rows
from kernels.cuda.k_quant_layout import BLOCK_BYTES
from kernels.cuda.quantized_formats import FORMATS
from kernels.cuda.quantized_layout import pack_matrix
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from tests.kernels.cuda.compiled import replaced, run_compiled
from tests.kernels.cuda.simulation import Kernel, Source, Sources, simulate
from tests.ptx import Fault as PtxFault
from tests.simt import Fault

FOUR = QuantizedMatmulVariant("Q4_K", "bfloat16", 8)
FIVE = QuantizedMatmulVariant("Q5_K", "float16", 8)
SIX = QuantizedMatmulVariant("Q6_K", "bfloat16", 8)
OWN_SCALES = QuantizedMatmulVariant("Q5_0", "float16", 8)
ROWS_OF_FIVE, ROWS_OF_SIX = (
    QuantizedRowsVariant("Q5_K", "bfloat16"),
    QuantizedRowsVariant("Q6_K", "float16"),
)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        FOUR,
        SIX,
        replace(FIVE, columns=16, gates=True),
        QuantizedMatmulVariant("Q5_1", "bfloat16", 16),
        QuantizedMatmulVariant("Q6_K", "float16", 32, writes_float32=True),
        QuantizedMatmulVariant("Q4_K", "bfloat16", 8, False, True, True),
        QuantizedMatmulVariant("Q6_K", "float16", 16, False, True, True, "clamped", True),
    ],
    ids=lambda variant: variant.name,
)
def test_products_with_k_quants_are_right(variant: QuantizedMatmulVariant) -> None:
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


def codes_case(label: str, dtype: str) -> tuple[Case, np.ndarray]:
    """Rows of x that are each one weight of every output: every code, every whole scale.

    y is float32. Returns the weights, float64 [K, N], too.
    """
    fmt = FORMATS[label]
    variant = QuantizedMatmulVariant(label, dtype, 32, writes_float32=True)
    case = draw_case(variant, 32, 32, 1, 0, alone=0)
    num_inputs = fmt.unit
    codes = np.resize(np.arange(2**fmt.bits) - fmt.offset, (32, num_inputs)).astype(np.int8)
    codes = np.roll(codes, 5, axis=0) if fmt.bits < 6 else codes
    matrix = QuantizedMatrix(
        codes,
        np.linspace(-3, 3, 32, dtype=np.float16)[:, None],
        np.linspace(2, -2, 32, dtype=np.float16)[:, None] if fmt.has_minimum else None,
    )
    if fmt.shares:
        count = fmt.runs * fmt.unit_spans
        whole = np.arange(32 * count).reshape(32, count)
        signed = fmt.runs == 2
        matrix = replace(
            matrix,
            whole_scales=(whole % 256 - 128).astype(np.int8)
            if signed
            else (whole % 64).astype(np.uint8),
            whole_minima=None if signed else (63 - whole % 64).astype(np.uint8),
        )
    one = {"bfloat16": 0x3F80, "float16": 0x3C00}[dtype]
    # Every eighth input, of all quads and all spans; the others' turn comes with the next weight.
    chosen = (
        np.arange(32) * (num_inputs // 32) + np.arange(32) * 3 % (num_inputs // 32)
    ) % num_inputs
    case.arrays["x"][:] = 0
    case.arrays["x"][np.arange(32), chosen] = one
    case.arrays["packed"] = pack_matrix(label, matrix)
    quants, scales, minima = matrix.operands
    group = num_inputs // scales.shape[1]
    weights = quants.astype(np.float64) * np.repeat(scales.astype(np.float64), group, axis=1)
    if minima is not None:
        weights += np.repeat(minima.astype(np.float64), num_inputs // minima.shape[1], axis=1)
    return case, weights[:, chosen].T


@pytest.mark.spread(2)
@pytest.mark.parametrize("run", [simulate, run_compiled], ids=["simulated", "compiled"])
@pytest.mark.parametrize(
    ("label", "dtype"),
    [("Q4_K", "bfloat16"), ("Q5_K", "float16"), ("Q6_K", "bfloat16"), ("Q5_0", "float16")],
)
def test_codes_times_whole_scales_are_exact(label, dtype, run) -> None:
    """Both products of a weight with a minimum are float32; only their sum is rounded."""
    case, weights = codes_case(label, dtype)

    found = to_float64("float32", run(case)["out"])[:, :-COLUMNS_BEHIND]

    np.testing.assert_array_equal(found, weights.astype(np.float32))


@pytest.mark.spread(1)
@pytest.mark.parametrize("run", [simulate, run_compiled], ids=["simulated", "compiled"])
@pytest.mark.parametrize(
    "variant",
    [ROWS_OF_FIVE, ROWS_OF_SIX, QuantizedRowsVariant("Q4_K", "float16")],
    ids=lambda variant: variant.name,
)
def test_rows_of_k_quants_are_unpacked(variant, run) -> None:
    for case in draw_cases(variant):
        assert check_case(case, run).faults == ()


@pytest.mark.spread(1)
@pytest.mark.parametrize("label", [label for label in BLOCK_BYTES if label != "Q4_K"])
def test_other_rows_are_unpacked(label) -> None:
    for case in draw_cases(QuantizedRowsVariant(label, "bfloat16")):
        assert check_case(case, simulate).faults == ()


def source_of(variant: QuantizedMatmulVariant | QuantizedRowsVariant) -> Sources:
    if isinstance(variant, QuantizedRowsVariant):
        return Sources(Source(quantized_rows, "make_quantized_rows", variant))
    kernel = quantized_matmul_tensor, "make_quantized_matmul", variant
    return Sources(Source(*kernel), Source(*kernel, quantized_operands))


def is_noticed(case: Case, kernels: dict[str, Kernel]) -> bool:
    try:
        outputs = simulate(case, kernels=kernels)
    except Fault:
        return True
    return bool(case.faults(outputs))


BREAKAGES = [
    (SIX, "weights[first_weights + 1, t] >> uint32(8 * h)", "weights[first_weights + 1, t]"),
    (SIX, "weights[first_weights + 1, t] >>", "weights[first_weights + 1, 0] >>"),
    (FIVE, "uint32(8 * t + 4 * h)", "uint32(8 * t)"),
    (OWN_SCALES, "load_rest(weights, tile % ring * tile_rows + 1, packed, place)", "pass"),
    (FIVE, "place = at + VECTOR_BYTES + lane * (4 * rest_words)", "place = at + VECTOR_BYTES"),
    (SIX, "load_half_vector(inputs, first + 2 * c + 1, x, at + TILE_INPUTS // 2)",
     "load_half_vector(inputs, first + 2 * c + 1, x, at)"),
    (SIX, "8 // runs * quad", "8 * quad"),
    (SIX, "scales[4 * run + i] = multiply_add(raised, shared_scales[i], excess)",
     "scales[i] = multiply_add(raised, shared_scales[i], excess)"),
    (SIX, "(RAISED if runs == 2 else 0)", "0"),
    (SIX, "scales[4 + row], of_run", "scales[row], of_run"),
    (SIX, "of_run = sums[num_totals + i, j]", "of_run = sums[i, j]"),
    (FOUR, "excess = shared_minima[i] * minimum_excess",
     "excess = shared_scales[i] * minimum_excess"),
    (FOUR, "raised_byte(scale_words[slot, 1], i)", "raised_byte(scale_words[slot, 0], i)"),
    (FOUR, "shared_at += group * shared_group_bytes", "pass"),
    (FOUR, "+ first_unit * shared_bytes", ""),
    (FOUR, "slot, next_span = span % scale_ring, span + scale_ring",
     "slot, next_span = span % scale_ring, span + round_spans"),
]  # fmt: skip


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "old", "new"), BREAKAGES, ids=lambda value: getattr(value, "name", value)[:34]
)
def test_a_broken_product_of_k_quants_is_noticed(variant, old, new) -> None:
    source = source_of(variant)
    assert source.count(old) == 1
    case = draw_case(variant, 3, 20, 3, 1, alone=0)

    assert is_noticed(case, source.with_replaced(old, new))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        (FOUR, "shared_at += shared_bytes", "pass"),
        (SIX, "% unit_tiles == 0", "% unit_tiles >= 0"),
        (SIX, "load_shared(shared_words, 0, packed, shared_at)\n            for span", "pass\n"
         "            for span"),
    ],
    ids=lambda value: getattr(value, "name", value)[:34],
)  # fmt: skip
def test_units_that_turn_wrongly_are_noticed(variant, old, new) -> None:
    """A round is a unit of eight tiles, or half of one: SIX has four on their way."""
    source = source_of(variant)
    case = draw_case(variant, 3, 20, 3, 0, alone=0)

    assert case.faults(simulate(case, kernels=source.unbroken())) == []
    assert is_noticed(case, source.with_replaced(old, new))


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        (ROWS_OF_FIVE, "at += first_tile // unit_tiles * shared_bytes", "pass"),
        (ROWS_OF_FIVE, "word = load_word(packed, at + 8)", "pass"),
        (ROWS_OF_FIVE, "at += group * shared_group_bytes + i // 2 * 4", "at += i // 2 * 4"),
        (ROWS_OF_FIVE, "shared_scale = high_half(word)", "pass"),
        (ROWS_OF_FIVE, "shared_minimum = high_half(word)", "pass"),
        (ROWS_OF_FIVE, "place = uint32(i % rows_of_word * rest_bits)", "place = uint32(0)"),
        (ROWS_OF_SIX, "at + i // rows_of_word * 4) >> place", "at) >> place"),
        (ROWS_OF_SIX, "of_run = second_scale", "pass"),
        (ROWS_OF_SIX, "float32(beside - RAISED)", "float32(beside)"),
        (ROWS_OF_SIX, "store_half_vector(out, place + TILE_INPUTS // 2 + 4 * quad, pairs, 1)",
         "store_half_vector(out, place + TILE_INPUTS // 2 + 4 * quad, pairs, 0)"),
        (ROWS_OF_SIX, "scale_at + span * span_bytes + 4)", "scale_at + span * span_bytes)"),
    ],
    ids=lambda value: getattr(value, "name", value)[:34],
)  # fmt: skip
def test_a_broken_unpacking_of_k_quants_is_noticed(variant, old, new) -> None:
    source = source_of(variant)
    assert source.count(old) == 1
    case = draw_cases(variant)[1]

    assert is_noticed(case, source.with_replaced(old, new))


@pytest.mark.parametrize(
    ("variant", "pattern", "replacement"),
    [
        (ROWS_OF_FIVE, r"(fma\.rn\.bf16x2 %r\d+, %r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
        (ROWS_OF_FIVE, r"(lop3\.b32 .*), %r\d+, 0xEA;", r"\1, 0, 0xEA;"),
        (ROWS_OF_SIX, r"shr\.u32 (.*), 6;", r"shr.u32 \1, 5;"),
        (ROWS_OF_SIX, r"shr\.u32 (.*), 2;", r"shr.u32 \1, 3;"),
    ],
)
def test_a_changed_instruction_of_k_quants_is_noticed(variant, pattern, replacement) -> None:
    case = draw_cases(variant)[0]
    try:
        outputs = run_compiled(case, texts=replaced(variant, pattern, replacement))
    except PtxFault:
        return
    assert case.faults(outputs)
