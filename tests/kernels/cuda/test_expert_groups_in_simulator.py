"""Routing that is limited to groups of experts, thread by thread."""

from __future__ import annotations

import dataclasses

import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.numerics import check_case
from kernels.cuda import expert_groups, route_experts
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.route_experts import RouteExpertsVariant
from tests.kernels.cuda.compiled import run_compiled
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault

LARGEST = RouteExpertsVariant(60, 6, normalises=False, groups=6, chosen_groups=2)
SUMMED = RouteExpertsVariant(80, 6, True, "sigmoid", True, groups=8, chosen_groups=3)
SHARED_OUT = RouteExpertsVariant(66, 3, True, "softmax", True, groups=22, chosen_groups=5)
ALONE = RouteExpertsVariant(32, 4, True, "sigmoid", groups=32, chosen_groups=7)
WIDE = RouteExpertsVariant(210, 3, True, "softmax", True, groups=3, chosen_groups=1)
ALL = RouteExpertsVariant(40, 6, True, "sigmoid", True, groups=5, chosen_groups=5)
GROUPED = pytest.mark.parametrize(
    "variant", [LARGEST, SUMMED, SHARED_OUT, ALONE, WIDE, ALL], ids=lambda variant: variant.name
)


@pytest.mark.spread(1)
@GROUPED
def test_experts_of_a_tokens_groups_are_chosen_weighed_and_sorted(variant):
    """The case of a few tokens: one of NaN, some with equal logits."""
    assert check_case(draw_cases(variant)[0], simulate).faults == ()


@pytest.mark.wide
@pytest.mark.parametrize("variant", [LARGEST, SUMMED, WIDE], ids=lambda variant: variant.name)
def test_compiled_kernels_choose_among_groups(variant):
    assert check_case(draw_cases(variant)[0], run_compiled).faults == ()


@pytest.mark.parametrize("variant", [LARGEST, SUMMED], ids=lambda variant: variant.name)
def test_groups_have_a_say_in_the_cases(variant):
    free = dataclasses.replace(variant, groups=1, chosen_groups=1)
    one, other = (draw_cases(of)[0].expected["order"] for of in (variant, free))
    assert (one.values != other.values).any()


def test_a_variant_without_groups_is_called_what_it_was():
    assert RouteExpertsVariant(8, 2).name == "route_experts_e8_c2"
    assert SUMMED.name == "route_experts_e80_c6_sigmoid_corrected_g8_3"
    assert LARGEST.name != dataclasses.replace(LARGEST, chosen_groups=3).name


LARGEST_SOURCE, SUMMED_SOURCE, WIDE_SOURCE = (
    Source(route_experts, "make_route_experts", variant, library=expert_groups)
    for variant in (LARGEST, SUMMED, WIDE)
)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("variant", "source", "old", "new"),
    [
        (LARGEST, LARGEST_SOURCE, "before < chosen_groups", "before <= chosen_groups"),
        (SUMMED, SUMMED_SOURCE, "second = max(max(second, behind), min(first, other))", "pass"),
        (LARGEST, LARGEST_SOURCE, "group < lane)", "group > lane)"),
        (WIDE, WIDE_SOURCE, "second = max(second, min(first, words[s]))", "pass"),
        (LARGEST, LARGEST_SOURCE, "other > own or", "other < own or"),
        (LARGEST, LARGEST_SOURCE, "group * size <= expert and", ""),
        (LARGEST, LARGEST_SOURCE, " and expert < (group + 1) * size", ""),
        (LARGEST, LARGEST_SOURCE, "first = max(first, other)", "pass"),
        (WIDE, WIDE_SOURCE, "first = max(first, words[s])", "first = words[s]"),
        (SUMMED, SUMMED_SOURCE, "max(second, behind)", "second"),
        (SUMMED, SUMMED_SOURCE, "min(first, other))", "other)"),
        (SUMMED, SUMMED_SOURCE, "if adds_two:\n                largest",
         "if False:\n                largest"),
        (SUMMED, SUMMED_SOURCE, "(lane + 32 * s) // size", "(32 * s) // size"),
        (SUMMED, SUMMED_SOURCE, "left_out |= uint32(1) << uint32(s)", "pass"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_choice_of_groups_is_noticed(variant, source, old, new):
    case = draw_cases(variant)[0]
    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RouteExpertsVariant(99, 2, groups=33), "groups must be between 1 and 32, got 33"),
        (lambda: RouteExpertsVariant(64, 2, groups=0), "groups must be between 1 and 32, got 0"),
        (lambda: RouteExpertsVariant(64, 2, groups=6), "experts must be a multiple of 6, got 64"),
        (lambda: RouteExpertsVariant(64, 9, groups=8), "chosen_groups must be between 2 and 8"),
        (lambda: RouteExpertsVariant(64, 9, groups=8, chosen_groups=9), "and 8, got 9"),
        (lambda: RouteExpertsVariant(8, 2, True, "sigmoid", True, 8, 2),
         "groups must be between 1 and 4, got 8"),
    ],
)  # fmt: skip
def test_groups_no_kernel_is_written_for_are_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
