"""Mixtures of experts: which a token goes through, and how what they give is put together.

Source: Shazeer et al. 2017; Jiang et al. 2024.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernels.interface import Float32Array

Int32Array = npt.NDArray[np.int32]


def route(
    logits: Float32Array, *, normalises: bool, chosen: Int32Array, weights: Float32Array
) -> None:
    """Choose experts for each token, and weigh them.

    `logits`: [T, E]. `chosen`, `weights`: [T, C], the experts with the C largest logits, the
    largest first, of equal ones the lower number; and softmax(logits) of each, over those C where
    it `normalises`, else over all E.
    """
    count = chosen.shape[1]
    chosen[:] = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    taken = np.take_along_axis(logits, chosen, axis=1).astype(np.float64)
    largest = taken[:, :1]
    over = taken if normalises else logits.astype(np.float64)
    weights[:] = np.exp(taken - largest) / np.exp(over - largest).sum(axis=1, keepdims=True)


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
