"""Mixtures of experts, thread by thread: choosing, sorting, products of pairs, adding up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case, to_float64
from bench.gpu.cases import draw_cases
from bench.gpu.cases.expert_products import (
    CHOSEN,
    Shape,
    dense_experts_case,
    quantized_experts_case,
)
from bench.gpu.numerics import check_case
from kernels.cuda import (
    add_experts,
    dense_matmul,
    dense_matmul_tensor,
    dense_sums,
    expert_tiles,
    quantized_matmul,
    quantized_matmul_tensor,
    quantized_sums,
    route_experts,
    router_logits,
)
from kernels.cuda.add_experts import AddExpertsVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.expert_tiles import most_tiles
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.cuda.router_logits import RouterLogitsVariant, tokens_of
from kernels.reference.mixture import sort_pairs
from tests.kernels.cuda.simulation import Source, Sources, simulate
from tests.simt import Fault, OutOfBounds, Race

MODULES = (add_experts, dense_matmul, quantized_matmul, route_experts, router_logits)
QUANTISED = QuantizedMatmulVariant("Q4_1", "bfloat16", 8, of_experts=True)
ZEROS = QuantizedMatmulVariant("Q8_Z", "float16", 16, of_experts=True, gates=True)
GATED = DenseMatmulVariant("bfloat16", 8, "gated", of_experts=True)
ROUNDED = DenseMatmulVariant("float16", 16, "rounded", of_experts=True)
ROUTE = RouteExpertsVariant(40, 6, normalises=False)
SIGMOID = RouteExpertsVariant(40, 6, True, "sigmoid", True)
CORRECTED = RouteExpertsVariant(8, 2, False, "softmax", True)
FACTORS = RouteExpertsVariant(40, 6, has_factors=True)
LOGITS = RouterLogitsVariant("bfloat16", 8)
ADD = AddExpertsVariant("float16", 6)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        LOGITS, RouterLogitsVariant("float16", 1), RouteExpertsVariant(8, 2), ROUTE,
        SIGMOID, CORRECTED, RouteExpertsVariant(33, 4, False, "sigmoid"), FACTORS,
        dataclasses.replace(FACTORS, normalises=False, scores="sigmoid", corrects=True),
        ADD, AddExpertsVariant("float32", 1), AddExpertsVariant("bfloat16", 9),
        QUANTISED, ZEROS, GATED, ROUNDED,
    ],
    ids=lambda variant: variant.name,
)  # fmt: skip
def test_a_kernel_of_mixtures_is_right_and_a_pairs_bits_are_those_it_has_alone(variant):
    cases = draw_cases(variant)
    if variant in (GATED, ROUNDED, ZEROS):  # the longer ones with all the others
        cases = cases[1:]
    for case in cases:
        assert check_case(case, simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        variant
        for module in MODULES
        for variant in module.variants(every=True)
        if getattr(variant, "of_experts", True)
    ],
    ids=lambda variant: variant.name,
)
def test_every_kernel_of_mixtures_is_right(variant):
    for case in draw_cases(variant, seed=3):
        assert check_case(case, simulate).faults == ()


@pytest.mark.wide
def test_the_width_of_tiles_has_no_say_in_a_product():
    """The same tokens, in tiles of 8, 16 and 32 pairs."""
    found = []
    for columns in (8, 16, 32):
        variant = dataclasses.replace(QUANTISED, columns=columns)
        case = quantized_experts_case(variant, Shape(13, 32, 3, 2, CHOSEN), seed=4)
        found.append(simulate(case, seed=columns)["out"])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.wide
def test_a_token_of_nan_spoils_no_other():
    case = quantized_experts_case(QUANTISED, Shape(5, 32, 3, 1, CHOSEN), seed=1)
    clean = simulate(case)["out"]
    case.arrays["x"][2, 7] = 0x7FFF

    out = simulate(case)["out"]

    spoilt = to_float64("bfloat16", out[2 * CHOSEN : 3 * CHOSEN, :32])
    assert np.isnan(spoilt).all()
    others = np.arange(len(out)) // CHOSEN != 2
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("tile_pairs", [8, 16, 32])
def test_there_are_never_more_tiles_than_there_is_room_for(tile_pairs):
    random = np.random.default_rng(tile_pairs)
    for num_experts, num_tokens, count in ((3, 40, 2), (60, 7, 4), (128, 1, 8), (5, 100, 5)):
        room = most_tiles(num_tokens * count, num_experts, tile_pairs)
        order = np.empty(num_tokens * count, np.int32)
        for _ in range(50):
            skewed = random.dirichlet(np.full(num_experts, 0.3))
            keys = np.log(skewed + 1e-30) + random.gumbel(size=(num_tokens, num_experts))
            chosen = np.argsort(-keys, axis=1)[:, :count].astype(np.int32)
            tiles = np.empty((room, 3), np.int32)
            sort_pairs(chosen, num_experts, tile_pairs, order, tiles)  # refuses more than room
            assert tiles[:, 2].sum() == num_tokens * count


def test_tokens_are_taken_one_by_one_only_where_there_is_one():
    assert [tokens_of(count) for count in (1, 2, 8, 100)] == [1, 8, 8, 8]
    assert RouteExpertsVariant(128, 8).takes(256)
    assert not RouteExpertsVariant(128, 8).takes(257)


NORMALISED = RouteExpertsVariant(8, 2)
NORMALISED_SOURCE = Source(route_experts, "make_route_experts", NORMALISED)
ROUTE_SOURCE, SIGMOID_SOURCE, CORRECTED_SOURCE, FACTORS_SOURCE = (
    Source(route_experts, "make_route_experts", variant)
    for variant in (ROUTE, SIGMOID, CORRECTED, FACTORS)
)


@pytest.mark.wide
def test_no_barrier_of_the_routing_can_be_left_out():
    case = draw_cases(ROUTE)[1]
    assert case.faults(simulate(case, kernels=ROUTE_SOURCE.unbroken())) == []
    lines = ROUTE_SOURCE.text.splitlines()
    barriers = [at for at in ROUTE_SOURCE.synchronisations() if "syncthreads" in lines[at]]
    assert len(barriers) == 3  # one of them in what is called twice
    for barrier in barriers:
        with pytest.raises((Race, OutOfBounds)):  # a tile as far away as memory's old content says
            simulate(case, kernels=ROUTE_SOURCE.without(barrier))


def quantised_case() -> Case:
    return quantized_experts_case(QUANTISED, Shape(10, 32, 2, 2, CHOSEN), seed=2)


def gated_case() -> Case:
    return dense_experts_case(GATED, Shape(10, 11, 2, 2, CHOSEN), seed=2)


def rounded_case() -> Case:
    return dense_experts_case(ROUNDED, Shape(9, 21, 2, 2, 1), seed=2)


QUANTISED_SOURCE = Sources(
    Source(quantized_matmul_tensor, "make_quantized_matmul", QUANTISED),
    Source(quantized_matmul_tensor, "make_quantized_matmul", QUANTISED, quantized_sums),
)
QUANTISED_TILES = Source(
    quantized_matmul_tensor, "make_quantized_matmul", QUANTISED, library=expert_tiles
)
GATED_SOURCE, ROUNDED_SOURCE = (
    Sources(
        Source(dense_matmul_tensor, "make_dense_matmul", variant),
        Source(dense_matmul_tensor, "make_dense_matmul", variant, dense_sums),
    )
    for variant in (GATED, ROUNDED)
)
LOGITS_SOURCE = Source(router_logits, "make_router_logits", LOGITS)
ADD_SOURCE = Source(add_experts, "make_add_experts", ADD)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("make", "source", "old", "new"),
    [
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "largest = warp_max(largest)", "pass"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE,
         "taken |= uint32(1) << uint32(expert // 32)", "pass"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "if expert % 32 == lane:", "if True:"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "(own - peak) * LOG2_E", "own * LOG2_E"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "logits[row + of_lane] - peak", "0 - peak"),
        (lambda: draw_cases(NORMALISED)[0], NORMALISED_SOURCE,
         "if lane < chosen:\n                if", "if True:\n                if"),
        (lambda: draw_cases(ROUTE)[1], ROUTE_SOURCE, "left -= of_tile", "left = 0"),
        (lambda: draw_cases(ROUTE)[1], ROUTE_SOURCE, "place += int32(1)", "pass"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "= sum_before(num_own, tiles_of_warps)",
         "= sum_before(left, tiles_of_warps)"),
        (lambda: draw_cases(ROUTE)[1], ROUTE_SOURCE, "if other < warp", "if other + 1 < warp"),
        (lambda: draw_cases(ROUTE)[1], ROUTE_SOURCE, "min(num_pairs, first + of_part)",
         "num_pairs"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "range(used_tiles + thread",
         "range(1 + used_tiles + thread"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "multiply_float32(weight, scale)", "weight"),
        (lambda: draw_cases(SIGMOID)[0], SIGMOID_SOURCE, "logit = logits[row + expert]", "pass"),
        (lambda: draw_cases(SIGMOID)[0], SIGMOID_SOURCE,
         "rank = add_float32(score, correction[of_lane])", "pass"),
        (lambda: draw_cases(SIGMOID)[0], SIGMOID_SOURCE, "-logit * LOG2_E", "logit * LOG2_E"),
        (lambda: draw_cases(CORRECTED)[0], CORRECTED_SOURCE,
         "everything = warp_sum(everything)", "pass"),
        (lambda: draw_cases(CORRECTED)[0], CORRECTED_SOURCE,
         "if scores_apart and not normalises:", "if False:"),
        (lambda: draw_cases(FACTORS)[0], FACTORS_SOURCE,
         "weight = multiply_float32(weight, factor)", "pass"),
        (lambda: draw_cases(FACTORS)[0], FACTORS_SOURCE,
         "factors[expert_of[token * chosen + lane]]", "factors[expert]"),
        (lambda: draw_cases(ROUTE)[0], ROUTE_SOURCE, "if has_factors:", "if True:"),
        (lambda: draw_cases(LOGITS)[0], LOGITS_SOURCE, "first_token + t < num_tokens", "True"),
        (lambda: draw_cases(LOGITS)[0], LOGITS_SOURCE, "part * ROUTER_VECTOR", "0"),
        (lambda: draw_cases(LOGITS)[0], LOGITS_SOURCE, "expert < num_experts", "True"),
        (lambda: draw_cases(ADD)[0], ADD_SOURCE, "weights[token * experts + first + c]",
         "weights[token * experts + c]"),
        (lambda: draw_cases(ADD)[0], ADD_SOURCE, "feature < num", "True"),
        (lambda: draw_cases(ADD)[0], ADD_SOURCE, "add_float32(before[0, i], sums[0, i])",
         "sums[0, i]"),
        (quantised_case, QUANTISED_SOURCE, "if first_row == end_row:\n                return",
         "pass"),
        (quantised_case, QUANTISED_SOURCE, "row = row_of_pair(order, row, share)", "pass"),
        (quantised_case, QUANTISED_SOURCE, "panel += expert *", "panel += 0 *"),
        (quantised_case, QUANTISED_SOURCE, "if row < end_row and output", "if output"),
        (quantised_case, QUANTISED_SOURCE,
         "out_row = row_of_pair(order, min(row, end_row - 1), 1)", "pass"),
        (quantised_case, QUANTISED_TILES, "// int32(share)", "// int32(1)"),
        (quantised_case, QUANTISED_TILES, "first + tiles[at + 2]", "first + tiles[at + 2] - 1"),
        (gated_case, GATED_SOURCE, "row += expert * (2 * num_outputs if gates else num_outputs)",
         "row += expert * num_outputs"),
        (rounded_case, ROUNDED_SOURCE,
         "row += expert * (2 * num_outputs if gates else num_outputs)", "pass"),
        (rounded_case, ROUNDED_SOURCE, "row = row_of_pair(order, row, share)", "pass"),
        (rounded_case, ROUNDED_SOURCE,
         "out_row = row_of_pair(order, min(row, end_row - 1), 1)", "pass"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_kernel_of_mixtures_is_noticed(make, source, old, new):
    case = make()
    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RouterLogitsVariant("float32", 1), "dtype must be one of bfloat16, float16"),
        (lambda: RouterLogitsVariant("float16", 4), "tokens must be one of 1, 8"),
        (lambda: LOGITS.grid(0, 8, 64), "num_tokens must be at least 1, got 0"),
        (lambda: LOGITS.grid(1, 8, 60), "hidden_size must be a multiple of 8, got 60"),
        (lambda: RouteExpertsVariant(513, 8), "experts must be between 1 and 512, got 513"),
        (lambda: RouteExpertsVariant(8, 2, True, "tanh"), "scores must be one of softmax, sigm"),
        (lambda: RouteExpertsVariant(8, 9), "chosen must be between 1 and 8, got 9"),
        (lambda: AddExpertsVariant("int8", 2), "dtype must be one of float32"),
        (lambda: AddExpertsVariant("float32", 33), "experts must be between 1 and 32, got 33"),
        (lambda: ADD.grid(1, 12), "hidden_size must be a multiple of 8, got 12"),
        (lambda: QUANTISED.experts_grid(1, 48, 32, 0), "num_outputs must be a multiple of 32"),
        (lambda: DenseMatmulVariant("float16", 8, "added", of_experts=True),
         "writes must be one of rounded, gated"),
        (lambda: DenseMatmulVariant("bfloat16", 8, "gated", normalises=True, of_experts=True),
         "normalises must be one of False"),
    ],
)  # fmt: skip
def test_a_mixture_no_kernel_is_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
