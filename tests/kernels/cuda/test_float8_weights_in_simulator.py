"""Weights of eight-bit floats: every code times every scale, in products and unpacked, and broken.

Products of all variants are run by `test_quantized_matmul_in_simulator`, with experts and biases
by the files of those.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case, to_float64
from bench.gpu.cases import draw_cases
from bench.gpu.cases.quantized_matmul import COLUMNS_BEHIND, draw_case
from bench.gpu.numerics import check_case
from kernels.cuda import quantized_matmul_tensor, quantized_operands, quantized_rows
from kernels.cuda.eight_bit_floats import FINITE, VALUES
from kernels.cuda.quantized_layout import pack_matrix
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from tests.kernels.cuda.compiled import replaced, run_compiled
from tests.kernels.cuda.simulation import Kernel, Source, Sources, simulate
from tests.ptx import Fault as PtxFault
from tests.simt import Fault

PRODUCT = QuantizedMatmulVariant("FP8_G128", "bfloat16", 8)
HALVES = QuantizedMatmulVariant("FP8", "float16", 8)
ROWS, ROWS_OF_HALVES = (
    QuantizedRowsVariant("FP8_G128", "bfloat16"),
    QuantizedRowsVariant("FP8", "float16"),
)
ALL_CODES = np.resize(FINITE, (32, 32))
SCALES = np.float32([1, -1 / 3, 2.0**-126, 3e-40, 1e-30, 7.5e35, -7e-12, 2.0**100])
"""As far as weights are float32, subnormal ones too."""


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        PRODUCT,
        HALVES,
        QuantizedMatmulVariant("FP8_G128", "float16", 16, gates=True),
        QuantizedMatmulVariant("FP8", "bfloat16", 32, writes_float32=True),
        QuantizedMatmulVariant("FP8_G128", "bfloat16", 8, False, True, True),
        QuantizedMatmulVariant("FP8", "float16", 16, False, True, True, "clamped", True),
    ],
    ids=lambda variant: variant.name,
)
def test_products_with_float8_are_right(variant):
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


def codes_case(dtype: str, scale: np.float32) -> Case:
    """Rows of x that are each one weight of every output, and every code; y is float32."""
    variant = QuantizedMatmulVariant("FP8", dtype, 8, writes_float32=True)
    case = draw_case(variant, 32, 32, 1, 0, alone=0)
    scales = np.full((32, 1), scale)
    one = {"bfloat16": 0x3F80, "float16": 0x3C00}[dtype]
    case.arrays["x"][:] = one * np.eye(32, dtype=np.uint16)
    case.arrays["packed"] = pack_matrix("FP8", QuantizedMatrix(VALUES[ALL_CODES], scales))
    return case


@pytest.mark.spread(2)
@pytest.mark.parametrize("run", [simulate, run_compiled], ids=["simulated", "compiled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_every_code_times_a_scale_is_rounded_once(scale, dtype, run):
    found = run(codes_case(dtype, scale))["out"][:, :-COLUMNS_BEHIND]

    # Sums begin with +0, and so does what is none.
    exact = VALUES[ALL_CODES].T.astype(np.float64) * scale + 0.0
    np.testing.assert_array_equal(found.view(np.uint32), exact.astype(np.float32).view(np.uint32))


@pytest.mark.spread(1)
@pytest.mark.parametrize("run", [simulate, run_compiled], ids=["simulated", "compiled"])
@pytest.mark.parametrize("variant", [ROWS, ROWS_OF_HALVES], ids=lambda variant: variant.name)
def test_rows_of_float8_are_unpacked(variant, run):
    for case in draw_cases(variant):
        assert check_case(case, run).faults == ()


def is_noticed(case: Case, kernels: dict[str, Kernel]) -> bool:
    try:
        outputs = simulate(case, kernels=kernels)
    except Fault:
        return True
    return bool(case.faults(outputs))


WIDE = "word_to_float32(scale_words[slot, i]) * raised_scale"
BREAKAGES = [
    (HALVES, WIDE, "word_to_float32(scale_words[slot, i])"),
    (PRODUCT, WIDE, "word_to_float32(scale_words[slot, 0]) * raised_scale"),
    (PRODUCT, "first, second = weights[v, 2 * h], weights[v, 2 * h + 1]",
     "first, second = weights[v, 2 * h + 1], weights[v, 2 * h]"),
    (PRODUCT, 'fmt.scale == "float32" or', ""),
    (PRODUCT, "WIDEN_FLOAT_BYTES[dtype] if is_float else", ""),
    (HALVES, "load_scales(scale_words, span, packed, at + group * group_bytes)",
     "load_scales(scale_words, span, packed, at)"),
    (ROWS, "scale_at += i * 4", "pass"),
    (ROWS_OF_HALVES, "scale_words[span]) * raised_scale", "scale_words[span])"),
    (ROWS_OF_HALVES, "WIDEN_FLOAT_BYTES[dtype] if is_float else", ""),
]  # fmt: skip


def source_of(variant: QuantizedMatmulVariant | QuantizedRowsVariant) -> Sources:
    if isinstance(variant, QuantizedRowsVariant):
        return Sources(Source(quantized_rows, "make_quantized_rows", variant))
    kernel = quantized_matmul_tensor, "make_quantized_matmul", variant
    return Sources(Source(*kernel), Source(*kernel, quantized_operands))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "old", "new"),
    BREAKAGES,
    ids=lambda value: getattr(value, "name", value)[:34],
)
def test_a_broken_kernel_of_float8_is_noticed(variant, old, new):
    if isinstance(variant, QuantizedRowsVariant):
        case = draw_cases(variant)[1]
    else:
        case = draw_case(variant, 3, 20, 3, 1, alone=0)
    assert case.faults(simulate(case, kernels=source_of(variant).unbroken())) == []
    assert is_noticed(case, source_of(variant).with_replaced(old, new))


@pytest.mark.parametrize(
    ("variant", "pattern", "replacement"),
    [
        (ROWS, r"(fma\.rn\.bf16x2 %r\d+, %r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
        (ROWS, r"(and\.b32 .*), -?\d+;", r"\1, 0x07F007F0;"),
        (ROWS_OF_HALVES, r"(prmt\.b32 .*), %r\d+;", r"\1, 0xA280;"),
        (ROWS_OF_HALVES, r"shl\.b32 (.*), 7;", r"shl.b32 \1, 6;"),
    ],
)
def test_a_changed_instruction_of_float8_is_noticed(variant, pattern, replacement):
    case = draw_cases(variant)[0]
    try:
        outputs = run_compiled(case, texts=replaced(variant, pattern, replacement))
    except PtxFault:
        return
    assert case.faults(outputs)


def test_a_code_that_is_no_number_is_as_large_as_the_next_would_be():
    """It is refused where models are loaded; here it spoils nobody's bits."""
    case = codes_case("bfloat16", np.float32(1))
    case = dataclasses.replace(case, arrays=dict(case.arrays))
    case.arrays["packed"] = case.arrays["packed"].copy()
    case.arrays["packed"][0] = 0xFF

    found = to_float64("float32", simulate(case)["out"])

    assert found[0, 0] == -480
    expected = VALUES[ALL_CODES].T
    np.testing.assert_array_equal(found[1:, :-COLUMNS_BEHIND], expected[1:])
