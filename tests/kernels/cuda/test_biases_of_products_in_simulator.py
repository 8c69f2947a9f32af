"""Products whose outputs have biases, thread by thread: of one matrix, of experts, of a router."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case
from bench.gpu.cases import dense_matmul as dense_cases
from bench.gpu.cases import draw_cases
from bench.gpu.cases import quantized_matmul as quantized_cases
from bench.gpu.cases.expert_products import (
    CHOSEN,
    Shape,
    dense_experts_case,
    quantized_experts_case,
)
from bench.gpu.numerics import check_case
from kernels.cuda import (
    dense_matmul_tensor,
    dense_sums,
    quantized_matmul_tensor,
    quantized_sums,
    router_logits,
)
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.router_logits import RouterLogitsVariant
from tests.kernels.cuda.simulation import Source, Sources, simulate
from tests.simt import Fault

QUANTISED = QuantizedMatmulVariant("Q8_0", "bfloat16", 8, biased=True)
DENSE = DenseMatmulVariant("bfloat16", 8, "added", panel_rows=16, biased=True)
OF_EXPERTS = {"of_experts": True, "biased": True}
CLAMPED = {**OF_EXPERTS, "activation": "clamped"}
QUANTISED_EXPERTS = QuantizedMatmulVariant("Q4_1", "float16", 16, **OF_EXPERTS)
QUANTISED_GATES = QuantizedMatmulVariant("Q8_0", "bfloat16", 8, gates=True, **CLAMPED)
DENSE_EXPERTS = DenseMatmulVariant("float16", 16, "rounded", **OF_EXPERTS)
DENSE_GATES = DenseMatmulVariant("bfloat16", 8, "gated", **CLAMPED)
LOGITS = RouterLogitsVariant("bfloat16", 8, biased=True)
QUANTISED_KINDS = (QUANTISED, QUANTISED_EXPERTS, QUANTISED_GATES)
DENSE_KINDS = (DENSE, DENSE_EXPERTS, DENSE_GATES)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "which"),
    [
        (QUANTISED, 1), (DENSE, 1), (LOGITS, 0),
        *(
            pytest.param(variant, which, marks=pytest.mark.wide)
            for variant, which in (
                (QUANTISED, 0), (DENSE, 2), (QUANTISED_EXPERTS, 0), (QUANTISED_GATES, 0),
                (QUANTISED_GATES, 1), (DENSE_EXPERTS, 0), (DENSE_GATES, 0), (DENSE_GATES, 1),
            )
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_a_biased_product_is_right_and_a_rows_bits_are_those_it_has_alone(variant, which):
    assert check_case(draw_cases(variant)[which], simulate).faults == ()


def quantised_case() -> Case:
    """Five panels in two blocks, the last one half empty: no whole vector of biases is there."""
    return quantized_cases.draw_case(QUANTISED, 3, 4 * 32 + 11, 2, 1, alone=0)


def dense_case() -> Case:
    return dense_cases.draw_case(DENSE, 3, 5 * 16 + 5, 2, 1, alone=0)


def quantised_gates_case() -> Case:
    return quantized_experts_case(QUANTISED_GATES, Shape(4, 80, 2, 1, CHOSEN), seed=2)


def dense_gates_case() -> Case:
    return dense_experts_case(DENSE_GATES, Shape(4, 27, 2, 2, CHOSEN), seed=2)


def logits_case() -> Case:
    return draw_cases(LOGITS)[0]


QUANTISED_SOURCES, QUANTISED_GATES_SOURCES = (
    Sources(
        Source(quantized_matmul_tensor, "make_quantized_matmul", variant),
        Source(quantized_matmul_tensor, "make_quantized_matmul", variant, quantized_sums),
    )
    for variant in (QUANTISED, QUANTISED_GATES)
)
DENSE_SOURCES, DENSE_GATES_SOURCES = (
    Sources(
        Source(dense_matmul_tensor, "make_dense_matmul", variant),
        Source(dense_matmul_tensor, "make_dense_matmul", variant, dense_sums),
    )
    for variant in (DENSE, DENSE_GATES)
)
LOGITS_SOURCE = Source(router_logits, "make_router_logits", LOGITS)
BROKEN = [
    (quantised_case, QUANTISED_SOURCES, "value = add_float32(value, to_float32(biases[bias_at]))",
     "pass"),
    (quantised_case, QUANTISED_SOURCES, "if biased and output < num_outputs:", "if biased:"),
    (quantised_case, QUANTISED_SOURCES, "bias_at = first_bias + output",
     "bias_at = first_bias + place"),
    (quantised_case, QUANTISED_SOURCES,
     "of_experts or (panel + 1) * panel_outputs <= num_outputs", "True"),
    (quantised_gates_case, QUANTISED_GATES_SOURCES,
     "first_bias = expert * num_outputs * rows_of_output", "first_bias = expert * num_outputs"),
    (quantised_gates_case, QUANTISED_GATES_SOURCES, "bias_at += output - place", "pass"),
    (quantised_gates_case, QUANTISED_GATES_SOURCES, "biases[bias_at + panel_outputs]",
     "biases[bias_at]"),
    (quantised_gates_case, QUANTISED_GATES_SOURCES,
     "other = add_float32(other, to_float32(bias))", "pass"),
    (dense_case, DENSE_SOURCES, "value = add_float32(value, to_float32(biases[bias_at]))", "pass"),
    (dense_case, DENSE_SOURCES, "if biased and output < num_outputs:", "if biased:"),
    (dense_gates_case, DENSE_GATES_SOURCES,
     "first_bias = expert * (2 * num_outputs if gates else num_outputs)", "pass"),
    (dense_gates_case, DENSE_GATES_SOURCES, "biases[bias_at + num_outputs]", "biases[bias_at]"),
    (dense_gates_case, DENSE_GATES_SOURCES, "other = add_float32(other, to_float32(bias))", "pass"),
    (logits_case, LOGITS_SOURCE, "total = add_float32(total, biases[expert])", "pass"),
    (logits_case, LOGITS_SOURCE, "biases[expert]", "biases[0]"),
]  # fmt: skip


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("make", "source", "old", "new"),
    BROKEN,
    ids=[f"{old[:28]} {new[:9]}" for *_, old, new in BROKEN],
)
def test_a_bias_that_is_left_out_or_anothers_is_noticed(make, source, old, new):
    case = make()
    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("make", "source"),
    [
        (quantised_case, QUANTISED_SOURCES), (dense_case, DENSE_SOURCES),
        (quantised_gates_case, QUANTISED_GATES_SOURCES), (dense_gates_case, DENSE_GATES_SOURCES),
    ],
)  # fmt: skip
def test_the_unbroken_products_are_right(make, source):
    case = make()
    assert case.faults(simulate(case, kernels=source.unbroken())) == []


@pytest.mark.parametrize("variant", [QUANTISED, DENSE], ids=lambda variant: variant.name)
def test_without_biases_what_stands_in_their_place_is_not_read(variant):
    """Other launches name any array there."""
    cases = quantized_cases if variant is QUANTISED else dense_cases
    case = cases.draw_case(dataclasses.replace(variant, biased=False), 3, 20, 2, 0, alone=0)
    del case.arrays["biases"]
    (launch,) = case.launches
    launch = dataclasses.replace(launch, arguments=(*launch.arguments[:-1], "x"))
    found = simulate(dataclasses.replace(case, launches=(launch,)))["out"]
    assert case.faults({"out": found}) == []
    assert not np.isnan(found.astype(np.float32)).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: QuantizedMatmulVariant("Q4_0", "bfloat16", 8, writes_float32=True, biased=True),
        lambda: DenseMatmulVariant("bfloat16", 8, "float32", biased=True),
        lambda: DenseMatmulVariant("bfloat16", 8, "rounded", normalises=True, biased=True),
    ],
)
def test_what_no_model_has_is_refused(make):
    with pytest.raises(
        UnsupportedVariantError, match=r"(writes_float32|biased) must be one of False"
    ):
        make()
