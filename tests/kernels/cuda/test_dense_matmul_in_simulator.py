"""Products with dense weights, run thread by thread against the specification."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case, to_float64
from bench.gpu.cases.dense_matmul import (
    COLUMNS_BEHIND,
    EPS,
    draw_case,
    draw_cases,
    exact_product,
)
from bench.gpu.numerics import check_case
from kernels.cuda import dense_matmul
from kernels.cuda.dense_matmul import DenseMatmulVariant, columns_of, panel_rows_of
from kernels.cuda.errors import UnsupportedVariantError
from kernels.reference.dense_matmul import normalised
from tests.kernels.cuda.simulation import simulate

PRECISION = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-16}  # of one rounding, relative

NORMED = DenseMatmulVariant("bfloat16", 8, "float32", normalises=True)
GATED = DenseMatmulVariant("bfloat16", 16, "gated", normalises=True)
ADDED = DenseMatmulVariant("bfloat16", 8, "added", panel_rows=16)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "which"),
    [(GATED, 1), (NORMED, 0), (DenseMatmulVariant("float16", 8, "gated"), 1), (ADDED, 2)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_product_is_right_and_a_rows_bits_are_those_it_has_alone(variant, which):
    case = draw_cases(variant, 0)[which]
    out = simulate(case)

    assert case.faults(out) == []
    # Nothing but x · weight, the last rounding and sums in float32: far closer than the tolerance.
    exact = exact_product(variant, case.arrays)
    error = np.abs(to_float64(variant.out_dtype, out["out"])[:, :-COLUMNS_BEHIND] - exact)
    assert (error <= PRECISION[variant.out_dtype] * np.abs(exact) + 1e-5).all()
    assert case.part is not None
    alone, select = case.part
    np.testing.assert_array_equal(simulate(alone, seed=1)["out"], select(out)["out"])


def test_a_weight_multiplied_before_the_product_costs_what_one_rounding_does():
    """Its products p are each off by 2⁻⁸ at most, their sum by 2⁻⁸·Σ|p|.

    Roundings know nothing of each other: errors have 0.42 · 2⁻⁸ in the mean square, their sum that
    of √Σp². It is what a norm in a launch of its own costs, which rounds what it writes.
    """
    case = draw_case(NORMED, 8, 40, 8, 1, alone=0)
    x, weights, norm_weight = (
        to_float64("bfloat16", case.arrays[name]) for name in ("x", "weights", "norm_weight")
    )
    parts = normalised(x, norm_weight, EPS)[:, None, :] * weights  # [M, N, K]

    error = simulate(case)["out"][:, :-COLUMNS_BEHIND] - parts.sum(axis=2)

    assert (np.abs(error) <= 2**-8 * np.abs(parts).sum(axis=2)).all()
    typical = np.sqrt(np.square(parts).sum(axis=2))
    assert 0.35 * 2**-8 < np.sqrt(np.square(error / typical).mean()) < 0.5 * 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [variant for variant in dense_matmul.variants(every=True) if not variant.of_experts],
    ids=lambda variant: variant.name,
)
def test_every_product_is_right(variant):
    for case in draw_cases(variant, 2):
        assert check_case(case, simulate).faults == ()


def run_by(case: Case, seed: int, **others: int) -> np.ndarray:
    """Return the output of a case's arrays by a variant with other columns or panels."""
    (one,) = case.launches
    variant = dataclasses.replace(one.variant, **others)
    launch = dataclasses.replace(one, variant=variant, grid=variant.grid(*one.arguments[4:8]))
    return simulate(dataclasses.replace(case, launches=(launch,)), seed=seed)["out"]


@pytest.mark.wide
@pytest.mark.parametrize(
    "writes",
    ["float32", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rounded", "gated"))],
)
def test_every_variant_gives_the_same_bits(writes):
    variant = DenseMatmulVariant("bfloat16", 16, writes, normalises=True)
    case = draw_case(variant, 9, 24, 9, 1, alone=0)
    panels = (32,) if variant.gates else (16, 32)

    first, *others = [
        run_by(case, seed, columns=columns, panel_rows=panel_rows)
        for seed, (columns, panel_rows) in enumerate((c, p) for c in (8, 16) for p in panels)
    ]

    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("variant", [NORMED, ADDED], ids=lambda variant: variant.name)
def test_a_row_that_holds_nan_and_infinity_spoils_no_other(variant):
    case = draw_case(variant, 3, 12, 3, 3, alone=1)
    clean = simulate(case)["out"]
    case.arrays["x"][1, 70] = 0x7FFF  # NaN
    case.arrays["x"][0, 5] = 0x7F80  # infinity

    out = simulate(case)["out"]

    assert np.isnan(to_float64(variant.out_dtype, out[1])).all()
    assert not np.isfinite(to_float64(variant.out_dtype, out[0])).any()
    np.testing.assert_array_equal(out[2], clean[2])


def test_a_gate_far_below_closes_and_one_far_above_lets_through():
    case = draw_case(GATED, 2, 1, 1, 0, alone=0)
    weights, x = case.arrays["weights"], case.arrays["x"]
    x[:], x[1, 0] = 0, 0x3F80
    x[0, 0] = 0xBF80  # −1 and 1: ± √32 when normalised
    case.arrays["norm_weight"][0] = 0x3F80
    weights[:, 0] = 0x4780, 0x4040  # 2¹⁶ and 3

    below, above = to_float64("bfloat16", simulate(case)["out"][:, 0])

    assert below == 0
    assert above == pytest.approx(3 * 32 * 2**16, rel=2**-8)


def test_few_outputs_have_panels_of_16_rows_and_the_variant_is_the_smallest_that_holds_the_rows():
    assert [panel_rows_of(n) for n in (1, 2048, 3072, 3073, 4096)] == [16, 16, 16, 32, 32]
    assert [columns_of(rows) for rows in (1, 8, 9, 16, 17, 64)] == [8, 8, 16, 16, 16, 16]


@pytest.mark.parametrize(
    ("num_outputs", "strands"), [(4096, 8), (6144, 8), (14336, 4), (28672, 2), (128256, 1)]
)
def test_a_matrix_has_as_many_strands_as_its_rows_ask_for(num_outputs, strands):
    assert 1 << NORMED.strand_bits(num_outputs) == strands
    assert 1 << GATED.strand_bits(num_outputs // 2) == strands


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseMatmulVariant("float32", 8), "dtype must be one of bfloat16, float16"),
        (lambda: DenseMatmulVariant("float16", 8, normalises=True),
         "dtype must be one of bfloat16, got"),
        (lambda: DenseMatmulVariant("bfloat16", 32), "columns must be one of 8, 16"),
        (lambda: DenseMatmulVariant("bfloat16", 8, "squared"), "writes must be one of rounded"),
        (lambda: DenseMatmulVariant("bfloat16", 8, panel_rows=8), "panel_rows must be one of 16"),
        (lambda: DenseMatmulVariant("bfloat16", 8, "gated", panel_rows=16),
         "panel_rows must be one of 32"),
        (lambda: ADDED.grid(0, 32, 32, 0), "num_rows must be at least 1, got 0"),
        (lambda: ADDED.grid(1, 0, 32, 0), "num_outputs must be at least 1, got 0"),
        (lambda: ADDED.grid(1, 32, 48, 0), "num_inputs must be a multiple of 32, got 48"),
        (lambda: ADDED.grid(1, 32, 0, 0), "num_inputs must be a multiple of 32, got 0"),
    ],
)  # fmt: skip
def test_a_product_the_kernel_is_not_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
