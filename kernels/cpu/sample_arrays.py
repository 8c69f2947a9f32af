"""Temperature and nucleus sampling over columns of parameters, for the array kernel set.

No sort: weights are integers, so the smallest kept weight is found by bisection on its value with
exact sums over the few tokens that have any weight.
"""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.interface import (
    BoolArray,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    UInt64Array,
)
from kernels.reference.philox import KEY_STEPS, MULTIPLIERS, ROUNDS
from kernels.reference.sampling import WEIGHT_ONE

WORD = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)
MULTIPLIER_0, MULTIPLIER_1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
KEY_STEP_0, KEY_STEP_1 = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
WEIGHTLESS = -math.log(WEIGHT_ONE) - 1.0
"""Below this exponent a weight is certainly 0: its exponential need not be computed."""


@compiled(
    "float64(uint64, int64, int64)",
)
def uniform(seed: np.uint64, sample_index: int, position: int) -> float:
    """Return Philox4x32-10's number in [0, 1); `kernels.reference.philox.uniform`."""
    place = np.uint64(position)
    c0, c1 = place & WORD, place >> SHIFT
    c2, c3 = np.uint64(sample_index) & WORD, np.uint64(0)
    k0, k1 = seed & WORD, seed >> SHIFT
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1 = (product1 >> SHIFT) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> SHIFT) ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + KEY_STEP_0) & WORD, (k1 + KEY_STEP_1) & WORD
    high, low = np.int64(c0 >> np.uint64(5)), np.int64(c1 >> np.uint64(6))
    return (high * 2.0**26 + low) / 2.0**53


@compiled(
    "int64(float32[::1])",
)
def argmax_if_finite(row: Float32Array) -> int:
    """Return the lowest token id with the largest logit, or −1 if a logit is not finite."""
    largest, best = row[0], 0
    # 0 · x is 0 for a finite x and NaN for infinities and NaN; a sum keeps a NaN.
    poison = np.float32(0.0)
    for v in range(row.shape[0]):
        poison += row[v] * np.float32(0.0)
        if row[v] > largest:
            largest, best = row[v], v
    return best if poison == np.float32(0.0) else -1


@compiled(
    "int64(int64[::1], int64)",
)
def sum_at_least(weights: Int64Array, threshold: int) -> int:
    """Return the sum of the weights ≥ threshold."""
    total = 0
    for i in range(weights.shape[0]):
        total += weights[i] if weights[i] >= threshold else 0
    return total


@compiled(
    "int64(int64[::1], int64, float64)",
)
def keep_nucleus(weights: Int64Array, total: int, top_p: float) -> int:
    """Zero the weights outside the nucleus and return the sum of those kept."""
    target = top_p * float(total)
    # The largest threshold whose sum reaches the target; threshold 1 does: its sum is the total.
    low, high = 1, int(WEIGHT_ONE) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if float(sum_at_least(weights, middle)) >= target:
            low = middle
        else:
            high = middle
    kept = sum_at_least(weights, low + 1)
    for i in range(weights.shape[0]):
        if weights[i] < low or (weights[i] == low and float(kept) >= target):
            weights[i] = 0
        elif weights[i] == low:
            kept += low
    return kept


@compiled(
    "int64(float32[::1], float64, float64, float64, float64)",
)
def draw(row: Float32Array, largest: float, temperature: float, top_p: float, u: float) -> int:
    """Return the token that `u` picks from the nucleus of a logits row."""
    tokens = np.empty(row.shape[0], dtype=np.int32)
    weights = np.empty(row.shape[0], dtype=np.int64)
    count, total = 0, 0
    for v in range(row.shape[0]):
        exponent = (float(row[v]) - largest) / temperature
        if exponent > WEIGHTLESS:
            weight = math.floor(math.exp(exponent) * WEIGHT_ONE)
            tokens[count], weights[count] = v, weight
            total += weight
            count += 1
    if top_p < 1.0:
        total = keep_nucleus(weights[:count], total, top_p)
    target = min(int(u * float(total)), total - 1)
    running = 0
    for i in range(count):
        running += weights[i]
        if running > target:
            return int(tokens[i])
    return int(tokens[count - 1])


@compiled(
    "void(float32[:, ::1], int32[::1], float64[::1], float64[::1], uint64[::1], int64[::1],"
    " int64[::1], int32[::1], boolean[::1])",
)
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
    """Draw sample k from row `logits_rows[k]` of `logits` into `out[k]`, each by itself."""
    for k in range(out.shape[0]):
        row = logits[logits_rows[k]]
        best = argmax_if_finite(row)
        is_finite[k] = best >= 0
        if best < 0:
            out[k] = 0
        elif temperatures[k] == 0.0:
            out[k] = best
        else:
            u = uniform(seeds[k], sample_indexes[k], positions[k])
            out[k] = draw(row, row[best], temperatures[k], top_ps[k], u)
