"""Routing that is limited to groups of experts, by the compiled operation."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import mixture as reference
from tests.kernels.cpu.routing_driver import Mixture, drawn
from tests.kernels.cpu.test_routing_operations import check_rows

KINDS = pytest.mark.parametrize(
    ("is_sigmoid", "corrects"), [(False, False), (False, True), (True, False), (True, True)]
)


@pytest.mark.parametrize(
    ("experts", "per_token", "num_groups", "groups_per_token"),
    [
        (160, 6, 8, 3),
        (256, 8, 8, 4),
        (40, 8, 5, 1),
        (40, 7, 5, 5),
        (12, 3, 6, 2),
        (1024, 9, 512, 7),
    ],
)
@pytest.mark.parametrize("normalises", [False, True])
@KINDS
def test_experts_of_groups_and_their_weights_are_those_of_the_reference(
    experts: int, per_token: int, num_groups: int, groups_per_token: int, normalises: bool,
    is_sigmoid: bool, corrects: bool,
) -> None:  # fmt: skip
    mixture, random = drawn(29, experts, per_token, 2), np.random.default_rng(experts)
    mixture.normalises, mixture.is_sigmoid, mixture.scale = normalises, is_sigmoid, 2.5
    mixture.num_groups, mixture.groups_per_token = num_groups, groups_per_token
    if corrects:
        spread = 0.5 if is_sigmoid else 2 / experts
        mixture.correction = spread * random.standard_normal(experts, np.float32)
    before = mixture.logits.copy()
    mixture.route(range(3))
    shape = 29, per_token
    chosen, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
    reference.route(
        before, normalises=normalises, chosen=chosen, weights=weights, is_sigmoid=is_sigmoid,
        correction=mixture.correction, scale=2.5, num_groups=num_groups,
        groups_per_token=groups_per_token,
    )  # fmt: skip
    np.testing.assert_array_equal(mixture.chosen[:29], chosen)
    np.testing.assert_allclose(mixture.weights[:29], weights, rtol=3e-6)
    np.testing.assert_array_equal(mixture.logits, before)
    mixture.check_ends()


@KINDS
def test_whoever_may_go_to_all_groups_has_the_bits_it_would_have_without(
    is_sigmoid: bool, corrects: bool
) -> None:
    found = []
    for groups in (0, 4):
        mixture = drawn(11, 24, 5)
        mixture.is_sigmoid, mixture.num_groups, mixture.groups_per_token = is_sigmoid, groups, 4
        if corrects:
            mixture.correction = np.random.default_rng(1).standard_normal(24, np.float32) / 4
        mixture.route()
        found.append(mixture)
    np.testing.assert_array_equal(found[0].chosen, found[1].chosen)
    np.testing.assert_array_equal(found[0].weights, found[1].weights)


@KINDS
def test_of_equal_groups_and_experts_those_with_lower_numbers_are_chosen(
    is_sigmoid: bool, corrects: bool
) -> None:
    """In the last row group 1 has the largest expert, and all others are as good as each other."""
    logits = np.float32([[0] * 12, [1, 0, 0, *[2] * 9], [0, 0, 0, 0, 7, 0, *[0] * 6]])
    mixture = Mixture(logits, 4, is_sigmoid=is_sigmoid, num_groups=4, groups_per_token=2)
    mixture.correction = np.zeros(12, np.float32) if corrects else None
    mixture.route()
    assert mixture.chosen[:3].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [4, 0, 1, 2]]


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_a_group_that_counts_as_much_as_a_lower_one_is_left_out_with_its_better_expert(
    is_sigmoid: bool,
) -> None:
    """Both sums are the same to the bit, for all scores are 1/2 or 1/4."""
    mixture = Mixture(np.zeros((1, 4), np.float32), 2, is_sigmoid=is_sigmoid)
    mixture.correction = np.float32([0.5, 0.5, 1.5, -0.5])
    mixture.num_groups, mixture.groups_per_token = 2, 1
    mixture.route()
    assert mixture.chosen[0].tolist() == [0, 1]


def test_a_group_counts_its_two_largest_ranks_with_a_correction_and_else_its_largest() -> None:
    logits = np.float32([[3, -9, 1, 1, 0, 0, -9, -9]])
    for correction, chosen in ((None, [0, 1]), (np.zeros(8, np.float32), [2, 3])):
        mixture = Mixture(logits, 2, is_sigmoid=True, correction=correction)
        mixture.num_groups, mixture.groups_per_token = 4, 1
        mixture.route()
        assert mixture.chosen[0].tolist() == chosen


def test_experts_of_other_groups_are_not_chosen_however_small_those_of_the_own_are() -> None:
    """A chosen expert's rank is the smallest there is, and negative ones are many."""
    corrections = np.float32([9, -np.inf, -1, -2, -3, -4])
    mixture = Mixture(np.zeros((1, 6), np.float32), 2, is_sigmoid=True, correction=corrections)
    mixture.num_groups, mixture.groups_per_token = 3, 3
    mixture.route()
    assert mixture.chosen[0].tolist() == [0, 2]
    logits = np.float32([[3e38, -3e38, 1, 1, 1, 1]])
    mixture = Mixture(logits, 2, num_groups=3, groups_per_token=1)
    mixture.route()
    assert mixture.chosen[0].tolist() == [0, 1]


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 4, 7, 12])
@KINDS
def test_a_row_that_is_not_finite_has_no_weights_and_experts_that_exist(
    spoiled: float, count: int, is_sigmoid: bool, corrects: bool
) -> None:
    mixture = drawn(3, 12, 4)
    mixture.is_sigmoid, mixture.num_groups, mixture.groups_per_token = is_sigmoid, 4, 2
    mixture.correction = np.zeros(12, np.float32) if corrects else None
    mixture.logits[1, :count] = spoiled
    mixture.routed()
    assert np.isnan(mixture.weights[1]).all()
    assert np.isfinite(mixture.weights[[0, 2]]).all()
    assert ((mixture.chosen[:3] >= 0) & (mixture.chosen[:3] < 12)).all()
    check_rows(mixture)
