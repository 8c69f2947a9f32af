"""Routing that is limited to groups of experts, as `kernels.reference.mixture` says it."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference.mixture import Float32Array, Int32Array, route


def routed(
    logits: Float32Array, per_token: int, num_groups: int, groups_per_token: int, *,
    normalises: bool = False, is_sigmoid: bool = False, correction: Float32Array | None = None,
    scale: float = 1.0,
) -> tuple[Int32Array, Float32Array]:  # fmt: skip
    shape = len(logits), per_token
    chosen, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
    route(
        logits, normalises=normalises, chosen=chosen, weights=weights, is_sigmoid=is_sigmoid,
        correction=correction, scale=scale, num_groups=num_groups,
        groups_per_token=groups_per_token,
    )  # fmt: skip
    return chosen, weights


def test_groups_are_those_with_the_largest_scores_and_weights_are_shares_of_all() -> None:
    """Experts 2 and 3 have larger logits than 1, in the group that has the third largest one."""
    logits = np.float32([[5, 0, 4, 3.9, 1, 1, 4.5, -9]])
    chosen, weights = routed(logits, 3, 4, 2)
    assert chosen.tolist() == [[0, 6, 1]]
    powers = np.exp(logits[0].astype(np.float64))
    np.testing.assert_allclose(weights[0], powers[[0, 6, 1]] / powers.sum(), rtol=1e-6)
    assert routed(logits, 3, 4, 3)[0].tolist() == [[0, 6, 2]]
    assert routed(logits, 2, 4, 1)[0].tolist() == [[0, 1]]


def test_with_a_correction_groups_are_those_with_the_largest_sums_of_two() -> None:
    """The largest sigmoid is expert 0's; the largest sum that of 2 and 3; then 7's correction."""
    logits, nothing = np.float32([[3, -9, 1, 1, 0, 0, -9, -9]]), np.zeros(8, np.float32)
    of_two, sigmoid = {"is_sigmoid": True}, 1 / (1 + np.exp(-1.0))
    chosen, weights = routed(logits, 2, 4, 1, correction=nothing, **of_two)
    assert chosen.tolist() == [[2, 3]]
    np.testing.assert_allclose(weights, sigmoid, rtol=1e-6)
    assert routed(logits, 2, 4, 1, **of_two)[0].tolist() == [[0, 1]]  # the largest score alone

    corrected = nothing.copy()
    corrected[7] = 3
    chosen, weights = routed(logits, 3, 4, 2, correction=corrected, **of_two)
    assert chosen.tolist() == [[7, 2, 3]]
    np.testing.assert_allclose(weights[0, 1:], sigmoid, rtol=1e-6)
    assert weights[0, 0] < 2e-4  # a correction has no say in weights


def test_of_three_scores_of_a_group_two_count() -> None:
    logits, nothing = np.float32([[0, 0, 0, 2, 0.1, -9]]), np.zeros(6, np.float32)
    chosen, _ = routed(logits, 2, 2, 1, is_sigmoid=True, correction=nothing)
    assert chosen.tolist() == [[3, 4]]


@pytest.mark.parametrize("correction", [None, np.zeros(12, np.float32)])
def test_of_equal_groups_and_experts_those_with_lower_numbers_are_chosen(
    correction: Float32Array | None,
) -> None:
    logits = np.float32([[0] * 12, [1, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2]])
    chosen, _ = routed(logits, 4, 4, 2, correction=correction)
    assert chosen.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]


def test_a_group_that_counts_as_much_as_a_lower_one_is_left_out_with_its_better_expert() -> None:
    corrections = np.float32([0.5, 0.5, 1.5, -0.5])
    chosen, _ = routed(np.zeros((1, 4), np.float32), 2, 2, 1, correction=corrections)
    assert chosen.tolist() == [[0, 1]]


@pytest.mark.parametrize("correction", [None, np.float32(np.arange(12) % 5)])
@pytest.mark.parametrize(("num_groups", "groups_per_token"), [(1, 1), (4, 4), (6, 6)])
def test_whoever_may_go_to_all_groups_goes_where_it_would_without(
    correction: Float32Array | None, num_groups: int, groups_per_token: int
) -> None:
    logits = np.random.default_rng(0).standard_normal((9, 12), np.float32)
    found = routed(logits, 5, num_groups, groups_per_token, correction=correction)
    for one, other in zip(found, routed(logits, 5, 1, 1, correction=correction), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("correction", [None, np.zeros(12, np.float32)])
def test_a_row_of_nan_goes_to_experts_that_exist(correction: Float32Array | None) -> None:
    chosen, weights = routed(np.full((1, 12), np.nan, "f4"), 5, 4, 2, correction=correction)
    assert sorted(chosen[0].tolist()) == [0, 1, 2, 3, 4]
    assert np.isnan(weights).all()


@pytest.mark.wide
@pytest.mark.parametrize("is_v3", [False, True])
def test_choice_and_weights_are_those_of_transformers(is_v3: bool) -> None:
    import torch

    if is_v3:
        from transformers import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3TopkRouter as Router,
        )
    else:
        from transformers import DeepseekV2Config as Config
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
            DeepseekV2TopkRouter as Router,
        )
    config = Config(
        hidden_size=24, num_attention_heads=1, n_routed_experts=40, num_experts_per_tok=6,
        n_group=8, topk_group=3, topk_method="group_limited_greedy", norm_topk_prob=is_v3,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router, random = Router(config), np.random.default_rng(4)
    x = random.standard_normal((200, 24), np.float32)
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(random.standard_normal((40, 24), np.float32) / 3))
        correction = None
        if is_v3:
            correction = random.standard_normal(40, np.float32) / 4
            router.e_score_correction_bias.copy_(torch.from_numpy(correction))
        logits, theirs, numbers = (part.numpy() for part in router(torch.from_numpy(x)))
    chosen, weights = routed(
        logits, 6, 8, 3, normalises=is_v3, is_sigmoid=is_v3, correction=correction, scale=2.5
    )
    order, their_order = chosen.argsort(axis=1), numbers.argsort(axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(chosen, order, 1), np.take_along_axis(numbers, their_order, 1)
    )
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, 1), np.take_along_axis(theirs, their_order, 1), rtol=1e-5
    )
    without = routed(
        logits, 6, 1, 1, normalises=is_v3, is_sigmoid=is_v3, correction=correction, scale=2.5
    )
    assert (without[0] != chosen).any(axis=1).mean() > 0.3  # groups have a say
