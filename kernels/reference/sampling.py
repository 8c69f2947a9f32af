"""Drawing a token from logits: greedy, or temperature and nucleus (top-p) sampling.

The exact specification, so that every device draws the same token from the same logits:

1. A row with a logit that is not finite is not sampled: `is_finite[k]` becomes False.
2. temperature 0: the token with the largest logit, the lowest id among equals.
3. Else every token gets an integer weight
       weight[v] = floor(exp((logit[v] − max logit) / temperature) · 2^40)
   computed in float64. All sums are sums of integers: exact, and so the same in any order of
   summation. What is 2^40 times less likely than the best token is never drawn.
4. Nucleus: tokens ordered by weight, largest first, equals by id, lowest first. Kept is the
   shortest prefix whose weights reach top_p · total (in float64); all tokens if top_p is 1.
5. Draw: with u in [0, 1) from (seed, sample index, position) alone (`philox.uniform`), the target
   is floor(u · kept total) (in float64, at most kept total − 1); the token is the first *in order
   of id* among the kept ones whose running sum of weights exceeds the target.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.interface import (
    BoolArray,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    UInt64Array,
)
from kernels.reference.philox import uniform

WEIGHT_ONE: Final = 2.0**40
"""Weight of the most likely token. With 2^22 tokens the sum still fits 63 bits."""


def sample(
    logits: Float32Array,
    logits_rows: Int32Array,
    temperatures: Float64Array,
    top_ps: Float64Array,
    seeds: UInt64Array,
    sample_indexes: Int64Array,
    positions: Int64Array,
    out: Int32Array,
    is_finite: BoolArray,
) -> None:
    """Draw sample k from row `logits_rows[k]` of `logits` into `out[k]`.

    `logits`: [R, V]. All others [K]; several samples may share a logits row. Where `is_finite[k]`
    becomes False, `out[k]` is 0 and means nothing.
    """
    for k in range(len(out)):
        row = logits[logits_rows[k]]
        is_finite[k] = np.isfinite(row).all()
        if not is_finite[k]:
            out[k] = 0
        elif temperatures[k] == 0.0:
            out[k] = np.argmax(row)
        else:
            weights = integer_weights(row, float(temperatures[k]))
            kept = nucleus(weights, float(top_ps[k]))
            u = uniform(int(seeds[k]), int(sample_indexes[k]), int(positions[k]))
            out[k] = draw(np.where(kept, weights, 0), u)


def integer_weights(row: Float32Array, temperature: float) -> Int64Array:
    """Return step 3's weight of every token of a logits row [V]."""
    shifted = row.astype(np.float64) - np.float64(row.max())
    with np.errstate(over="ignore"):  # a tiny temperature: −inf, whose exponential is the right 0
        exponents = shifted / temperature
    return np.floor(np.exp(exponents) * WEIGHT_ONE).astype(np.int64)


def nucleus(weights: Int64Array, top_p: float) -> BoolArray:
    """Return which tokens step 4 keeps."""
    kept = np.ones(len(weights), dtype=np.bool_)
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        running = np.cumsum(weights[order])
        num_kept = int(np.searchsorted(running.astype(np.float64), top_p * float(running[-1]))) + 1
        kept[order[num_kept:]] = False
    return kept


def draw(weights: Int64Array, u: float) -> int:
    """Return the token that `u` picks by step 5 among weights whose sum is positive."""
    running = np.cumsum(weights)
    total = int(running[-1])
    target = min(int(u * float(total)), total - 1)
    return int(np.searchsorted(running, target, side="right"))
