"""Mixtures of experts: which a token goes through, and how what they give is put together.

Source: Shazeer et al. 2017; Jiang et al. 2024; of groups DeepSeek-AI 2024 (V2), of sigmoids and
corrections DeepSeek-AI 2024 (V3).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.interface import Float32Array

Int32Array = npt.NDArray[np.int32]
LEAST: Final = 1e-20
"""Added to a sum of sigmoids, all of which may be nothing. As much as DeepSeek-V3's; of LFM2 it is
1e-6 in transformers, which no sum of float32 notices unless all its experts are hardly chosen."""


def route(
    logits: Float32Array,
    *,
    normalises: bool,
    chosen: Int32Array,
    weights: Float32Array,
    is_sigmoid: bool = False,
    correction: Float32Array | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
    expert_scales: Float32Array | None = None,
) -> None:
    """Choose experts for each token, and weigh them.

    `logits`: [T, E]. A score is softmax(logits) over all E, or the sigmoid of a logit. `chosen`,
    `weights`: [T, C], the experts with the C largest logits, or with a `correction`, float32 [E],
    scores and corrections; the largest first, of equal ones the lower number. They are of
    `groups_per_token` of `num_groups` groups (`experts_of_groups`). Weights are their scores times
    `scale`, where it `normalises` over the sum of those C, of sigmoids and `LEAST`, and times the
    number of each expert in `expert_scales`, float32 [E].
    """
    count = chosen.shape[1]
    exact = logits.astype(np.float64)
    if is_sigmoid:
        scores = 1 / (1 + np.exp(-exact))
    else:
        powers = np.exp(exact - exact.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    ranks = logits if correction is None else scores.astype(np.float32) + correction
    if num_groups > 1:
        num_largest = 1 if correction is None else 2
        allowed = experts_of_groups(ranks, num_groups, groups_per_token, num_largest)
        order = np.argsort(-np.take_along_axis(ranks, allowed, axis=1), axis=1, kind="stable")
        chosen[:] = np.take_along_axis(allowed, order[:, :count], axis=1)
    else:
        chosen[:] = np.argsort(-ranks, axis=1, kind="stable")[:, :count]
    taken = np.take_along_axis(scores, chosen, axis=1)
    total = taken.sum(axis=1, keepdims=True) + LEAST * is_sigmoid if normalises else 1.0
    weights[:] = taken / total * scale
    if expert_scales is not None:
        weights *= expert_scales[chosen]


def experts_of_groups(
    ranks: Float32Array, num_groups: int, groups_per_token: int, num_largest: int
) -> npt.NDArray[np.int64]:
    """Return the experts that each token may choose, [T, n], their numbers rising.

    `ranks`: [T, E], by which experts are chosen. A group is E / `num_groups` neighbours, and counts
    as much as the sum of its `num_largest` largest ranks; a token has the `groups_per_token` that
    count most, of equal ones those with the lower numbers.
    """
    of_groups = ranks.reshape(len(ranks), num_groups, -1)
    size = of_groups.shape[2]
    sums = -np.sort(-of_groups, axis=2)[:, :, :num_largest].sum(axis=2)
    best = np.argsort(-sums, axis=1, kind="stable")[:, :groups_per_token]
    return (np.sort(best, axis=1)[:, :, None] * size + np.arange(size)).reshape(len(ranks), -1)


def sort_pairs(
    chosen: Int32Array, num_experts: int, tile_pairs: int, order: Int32Array, tiles: Int32Array
) -> None:
    """List pairs expert by expert, and cut each expert's list into tiles.

    `chosen`: [T, C]; pair t · C + c is token t and its c-th expert. `order`: [T · C], pairs, those
    of an expert in their own order. `tiles`: [n, 3], an expert, the place in `order` of its first
    pair, how many pairs, `tile_pairs` at most; behind the last one all zeros.
    """
    experts = chosen.reshape(-1)
    order[:] = np.argsort(experts, kind="stable")
    counts = np.bincount(experts, minlength=num_experts)
    firsts = np.cumsum(counts) - counts
    found = [
        (expert, firsts[expert] + done, min(tile_pairs, counts[expert] - done))
        for expert in range(num_experts)
        for done in range(0, counts[expert], tile_pairs)
    ]
    tiles[:] = 0
    tiles[: len(found)] = found


def add_experts(given: Float32Array, weights: Float32Array, out: Float32Array) -> None:
    """Add to each token Σ over its experts of weight · what that expert gave.

    `given`: [T, C, N]. `weights`: [T, C]. `out`: [T, N].
    """
    out += np.einsum("tcn,tc->tn", given.astype(np.float64), weights).astype(np.float32)


def add_shared(given: Float32Array, gates: Float32Array, out: Float32Array) -> None:
    """Add to each token the sigmoid of its gate times what an MLP gave it that all go through.

    `given`, `out`: [T, N]. `gates`: [T].
    """
    sigmoids = 1 / (1 + np.exp(-gates.astype(np.float64)))
    out += (given * sigmoids[:, None]).astype(np.float32)
