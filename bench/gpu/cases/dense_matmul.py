"""Products of few rows with dense weights: ragged in every direction, a row's bits its own.

Rows of x have magnitudes of their own, of which one is near eps where x is normalised; the first
gate is far out on both sides. Rows of `out` go on behind N, where they must stay NaN; where the
product is added to them they are read, too. What lies behind W and x is nobody's (`_guarded`, or
the end of an array). One row is also multiplied alone, by the variant for few rows with the
smallest panels: that must give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.quantized_matmul import draw_biases
from kernels.cuda.dense_matmul import COLUMNS, PANELS, DenseMatmulVariant
from kernels.cuda.quantized_formats import TILE_INPUTS
from kernels.reference.dense_matmul import dense_matmul, gated, normalised

COLUMNS_BEHIND = 2
EPS = 1e-5
FAR_GATE = 64.0


def draw_cases(variant: DenseMatmulVariant, seed: int) -> list[Case]:
    """Two strands that go round the ring, with panels to spare; 8 of which some are empty; none.

    The last one has several panels in a block, and a block with one panel.
    """
    columns, panel = variant.columns, variant.panel_outputs
    longest = 4 * variant.ring + 1
    return [
        draw_case(
            variant, columns - 1, panel + panel // 2 - 3, longest, 1, alone=columns - 3, seed=seed
        ),
        draw_case(variant, columns + 3, panel - 11, 9, 3, alone=columns + 1, seed=seed + 1),
        draw_case(variant, 2, 8 * panel + 5, 2, 0, alone=1, seed=seed + 2),
    ]


def draw_case(
    variant: DenseMatmulVariant,
    num_rows: int,
    num_outputs: int,
    num_tiles: int,
    strand_bits: int,
    *,
    alone: int,
    seed: int = 0,
) -> Case:
    """Draw x [M, K], K being so many tiles of 32, and W; row `alone` is the part."""
    rng = np.random.default_rng(seed)
    num_inputs = TILE_INPUTS * num_tiles
    magnitudes = np.resize([1.0, 3.0, 0.01 if variant.normalises else 0.1], (num_rows, 1))
    x = to_stored(variant.dtype, rng.standard_normal((num_rows, num_inputs)) * magnitudes)
    weight_rows = 2 * num_outputs if variant.gates else num_outputs
    weights = rng.standard_normal((weight_rows, num_inputs)) / np.sqrt(num_inputs)
    if variant.gates:
        weights[0] *= FAR_GATE
        weights[num_outputs] /= FAR_GATE
    norm_weight = rng.uniform(0.2, 1.5, num_inputs)
    # What the product is added to, or the poison that it replaces.
    before = poison(variant.out_dtype, (num_rows, num_outputs + COLUMNS_BEHIND))
    if variant.writes == "added":
        residual = to_stored(variant.dtype, rng.standard_normal((num_rows, num_outputs)))
        before[:, :num_outputs] = residual
    inputs = {
        "weights": to_stored(variant.dtype, weights),
        "norm_weight": to_stored(variant.dtype, norm_weight),
        "biases": draw_biases(rng, variant, weight_rows),
    }
    exact = exact_product(variant, {"out": before, "x": x, **inputs})
    tolerance = TOLERANCES[variant.out_dtype] * max(1.0, float(np.abs(exact).max()) / 4)
    expected = np.pad(exact, ((0, 0), (0, COLUMNS_BEHIND)), constant_values=np.nan)

    def case(one: DenseMatmulVariant, rows: slice) -> Case:
        count = len(expected[rows])
        grid = one.grid(count, num_outputs, num_inputs, strand_bits)
        scalars = (count, num_outputs, num_inputs, strand_bits, expected.shape[1], EPS)
        return Case(
            f"{variant.name} {num_rows} × {num_inputs} × {num_outputs}, {1 << strand_bits} strands",
            {"out": before[rows].copy(), "x": x[rows], **inputs},
            (Launch(one, grid, ("out", "x", "weights", "norm_weight", *scalars, "biases")),),
            {"out": Expected(one.out_dtype, expected[rows], tolerance)},
        )

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"out": outputs["out"][alone : alone + 1]}

    part = case(of_few_rows(variant), slice(alone, alone + 1))
    return dataclasses.replace(case(variant, slice(None)), part=(part, select))


def exact_product(
    variant: DenseMatmulVariant, arrays: Mapping[str, Array], *, rounds: bool = True
) -> Array:
    """Return [M, N] in float64 of a case's arrays, `out` being as it is before the launch.

    Of what the kernel rounds on its way only x · weight is, if `rounds`: all else is float32.
    """

    def stored(values: Array) -> Array:
        return to_float64(variant.dtype, to_stored(variant.dtype, values)) if rounds else values

    x, weights = (to_float64(variant.dtype, arrays[name]) for name in ("x", "weights"))
    if variant.normalises:
        x = normalised(x, to_float64(variant.dtype, arrays["norm_weight"]), EPS, stored)
    product: Array = dense_matmul(x, weights)
    if variant.biased:
        product += to_float64(variant.dtype, arrays["biases"])
    if variant.gates:
        return gated(product, variant.activation)
    if variant.writes == "added":
        product += to_float64(variant.dtype, arrays["out"][:, : len(weights)])
    return product


def of_few_rows(variant: DenseMatmulVariant) -> DenseMatmulVariant:
    """Return the kernel that multiplies a row alone, as others do many."""
    panel_rows = variant.panel_rows if variant.gates else PANELS[0]
    return dataclasses.replace(variant, columns=COLUMNS[0], panel_rows=panel_rows)
