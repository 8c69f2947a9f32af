"""Experts behind the first 2³² weights are found, and so are their biases."""

from __future__ import annotations

import dataclasses

import pytest

from bench.gpu.case import Case
from bench.gpu.cases import draw_cases
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from tests.kernels.cuda.far_memory import FAR, RUNS, faults, moved

pytestmark = RUNS
EXPERT, NUM_PAIRS = 0, 2
"""Of a tile's numbers."""


def behind(case: Case, far: int) -> Case:
    """Return the case with `far` other experts ahead of its own."""
    tiles = case.arrays["tiles"].copy()
    tiles[tiles[:, NUM_PAIRS] > 0, EXPERT] += far
    return dataclasses.replace(case, arrays={**case.arrays, "tiles": tiles})


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [
        QuantizedMatmulVariant("FP8", "bfloat16", 8, of_experts=True),
        QuantizedMatmulVariant("FP8_G128", "bfloat16", 8, of_experts=True, gates=True),
        DenseMatmulVariant("bfloat16", 8, "rounded", of_experts=True),
        QuantizedMatmulVariant("Q4_0", "bfloat16", 8, of_experts=True),
        QuantizedMatmulVariant("MXFP4", "bfloat16", 8, of_experts=True, gates=True),
        QuantizedMatmulVariant("Q5_K", "float16", 8, of_experts=True, gates=True),
        QuantizedMatmulVariant("Q6_K", "bfloat16", 8, of_experts=True),
        DenseMatmulVariant("bfloat16", 8, "gated", of_experts=True),
    ],
    ids=lambda variant: variant.name,
)
def test_products_find_far_experts(variant, run):
    case = draw_cases(variant)[1]
    far = FAR // case.arrays["weights"][0].size + 1

    assert faults(behind(moved(case, "weights", far), far), run) == []


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [
        DenseMatmulVariant("bfloat16", 8, "rounded", of_experts=True, biased=True),
        QuantizedMatmulVariant("Q4_0", "bfloat16", 8, of_experts=True, biased=True),
    ],
    ids=lambda variant: variant.name,
)
def test_products_find_the_biases_of_far_experts(variant, run):
    """There are far fewer of these than weights, so the experts are farther."""
    case = draw_cases(variant)[1]
    far = FAR // case.arrays["biases"].shape[1] + 1

    assert faults(behind(moved(moved(case, "weights", far), "biases", far), far), run) == []
