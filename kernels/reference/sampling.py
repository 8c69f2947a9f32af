"""Choosing a token from logits: greedy, or drawn by temperature, top-k, top-p and min-p.

The exact specification, so that every device chooses the same token from the same logits:

1. A row with a logit that is not finite is not sampled but reported.
2. Logit bias, penalties and mask change the logits (`kernels.reference.logit_adjustments`).
3. temperature 0: the token with the largest logit, the lowest id among equals.
4. Else every token gets an integer weight
       weight[v] = floor(e^((logit[v] − max logit) · (1 / temperature)) · 2^40)
   computed in float64 (`kernels.reference.exponential`; 1 / temperature at most the largest
   number). All sums are sums of integers: exact, and so the same in any order of summation. What is
   2^40 times less likely than the best token is never drawn.
5. Tokens are ordered by weight, largest first, equals by id, lowest first. What follows keeps a
   prefix of this order, each step what the steps before have left:
   a. top-k: the first k; all if k is 0.
   b. top-p: the shortest prefix whose weights reach top_p · total (in float64), where the total is
      that of the tokens left by top-k; all if top_p is 1.
   c. min-p: the tokens with a weight of at least min_p · 2^40, that is, min_p times as likely as
      the best one; all if min_p is 0.
6. Draw: with u in [0, 1) from (seed, sample index, position) alone (`philox.uniform`), the target
   is floor(u · kept total) (in float64, at most kept total − 1); the token is the first *in order
   of id* among the kept ones whose running sum of weights exceeds the target.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
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
from kernels.reference.exponential import exp
from kernels.reference.logit_adjustments import Adjustments, adjusted_logits
from kernels.reference.philox import uniform

WEIGHT_ONE: Final = 2.0**40
"""Weight of the most likely token. With 2^22 tokens the sum still fits 63 bits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How one token is chosen; the defaults of the later fields leave their steps out."""

    temperature: float
    top_p: float
    seed: int
    sample_index: int
    position: int
    top_k: int = 0
    min_p: float = 0.0
    adjustments: Adjustments = field(default_factory=Adjustments)


def choose(row: Float32Array, choice: Choice) -> int | None:
    """Return the token chosen from a row of logits [V], None if they are not finite."""
    if not np.isfinite(row).all():
        return None
    row = adjusted_logits(row, choice.adjustments)
    if choice.temperature == 0.0:
        return int(np.argmax(row))
    weights = integer_weights(row, choice.temperature)
    weights = np.where(first_by_weight(weights, choice.top_k), weights, 0)
    weights = np.where(nucleus(weights, choice.top_p), weights, 0)
    weights = np.where(weights >= choice.min_p * WEIGHT_ONE, weights, 0)
    return draw(weights, uniform(choice.seed, choice.sample_index, choice.position))


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
        choice = Choice(
            float(temperatures[k]),
            float(top_ps[k]),
            int(seeds[k]),
            int(sample_indexes[k]),
            int(positions[k]),
        )
        token = choose(logits[logits_rows[k]], choice)
        is_finite[k] = token is not None
        out[k] = token or 0


def integer_weights(row: Float32Array, temperature: float) -> Int64Array:
    """Return step 4's weight of every token of a logits row [V]."""
    shifted = row.astype(np.float64) - np.float64(row.max())
    with np.errstate(over="ignore"):  # a tiny temperature: −inf, whose exponential is small enough
        exponents = shifted * inverse(temperature)
    return np.floor(exp(exponents) * WEIGHT_ONE).astype(np.int64)


def inverse(temperature: float) -> float:
    """Return 1 / temperature, at most the largest number: 0 times it is still 0."""
    return min(1.0 / max(temperature, sys.float_info.min), sys.float_info.max)


def order_by_weight(weights: Int64Array) -> Int64Array:
    """Return the token ids in step 5's order."""
    return np.argsort(-weights, kind="stable")


def first_by_weight(weights: Int64Array, top_k: int) -> BoolArray:
    """Return which tokens step 5a keeps."""
    kept = np.ones(len(weights), dtype=np.bool_)
    if top_k:
        kept[order_by_weight(weights)[top_k:]] = False
    return kept


def nucleus(weights: Int64Array, top_p: float) -> BoolArray:
    """Return which tokens step 5b keeps."""
    kept = np.ones(len(weights), dtype=np.bool_)
    if top_p < 1.0:
        order = order_by_weight(weights)
        running = np.cumsum(weights[order])
        num_kept = int(np.searchsorted(running.astype(np.float64), top_p * float(running[-1]))) + 1
        kept[order[num_kept:]] = False
    return kept


def draw(weights: Int64Array, u: float) -> int:
    """Return the token that `u` picks by step 6 among weights whose sum is positive."""
    running = np.cumsum(weights)
    total = int(running[-1])
    target = min(int(u * float(total)), total - 1)
    return int(np.searchsorted(running, target, side="right"))
