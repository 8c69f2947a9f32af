"""Causal attention through block tables; specification: `kernels.reference.paged_attention`.

How a work item (token, kv head) is computed, for the P = H / G query heads of the group at once, so
that every key and value is loaded once for all of them:

1. scores[p, j] = scale · q[p]·K[j] for all positions j, block by block;
2. the largest score, the exponentials and their sum, per query head;
3. acc[p] = Σ_j weight[p, j] · V[j], blocks and positions in ascending order; divided by the sum.

All scores are kept (4 bytes a position and query head), so there is no rescaling, and the order of
every sum follows from the token's position alone. Measured choice: positions go in fours, which
loads q and acc a quarter as often.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.exponential import exp32
from kernels.interface import Float32Array, Int32Array

LANES = 16
"""Independent running maxima: a single one would be a chain the compiler may not vectorise."""


@compiled(
    "void(float32[:, ::1], float32[:, ::1], int64, float64, float32[:, ::1])",
    free_order=True,
)
def score_block(
    q: Float32Array, keys: Float32Array, start: int, scale: float, scores: Float32Array
) -> None:
    """Write scale · q·Kᵀ for the `keys` [J, D] of one block to scores[:, start : start + J]."""
    group, head_dim = q.shape
    factor = np.float32(scale)
    count = keys.shape[0]
    fours = count - count % 4
    for p in range(group):
        for j in range(0, fours, 4):
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for d in range(head_dim):
                x = q[p, d]
                s0 += x * keys[j, d]
                s1 += x * keys[j + 1, d]
                s2 += x * keys[j + 2, d]
                s3 += x * keys[j + 3, d]
            scores[p, start + j] = s0 * factor
            scores[p, start + j + 1] = s1 * factor
            scores[p, start + j + 2] = s2 * factor
            scores[p, start + j + 3] = s3 * factor
        for j in range(fours, count):
            s0 = np.float32(0.0)
            for d in range(head_dim):
                s0 += q[p, d] * keys[j, d]
            scores[p, start + j] = s0 * factor


@compiled(
    "void(float32[:, ::1], float32[:, ::1], int64, float32[:, ::1])",
)
def accumulate_block(
    weights: Float32Array, values: Float32Array, start: int, acc: Float32Array
) -> None:
    """Add Σ_j weights[:, start + j] · values[j] of one block [J, D] to `acc` [P, D]."""
    group, head_dim = acc.shape
    count = values.shape[0]
    fours = count - count % 4
    for p in range(group):
        for j in range(0, fours, 4):
            w0, w1 = weights[p, start + j], weights[p, start + j + 1]
            w2, w3 = weights[p, start + j + 2], weights[p, start + j + 3]
            for d in range(head_dim):
                a = acc[p, d] + w0 * values[j, d]
                a = a + w1 * values[j + 1, d]
                a = a + w2 * values[j + 2, d]
                acc[p, d] = a + w3 * values[j + 3, d]
        for j in range(fours, count):
            w0 = weights[p, start + j]
            for d in range(head_dim):
                acc[p, d] += w0 * values[j, d]


@compiled(
    "float32(float32[::1])",
)
def largest(values: Float32Array) -> float:
    """Return the largest of `values`, ignoring NaN (it comes out through the exponentials)."""
    lanes = np.full(LANES, -np.inf, dtype=np.float32)
    count = values.shape[0]
    whole = count - count % LANES
    for j in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = values[j + lane] if values[j + lane] > lanes[lane] else lanes[lane]
    for j in range(whole, count):
        lanes[0] = values[j] if values[j] > lanes[0] else lanes[0]
    best = float(lanes[0])
    for lane in range(1, LANES):
        best = lanes[lane] if lanes[lane] > best else best
    return best


@compiled(
    "float32(float32[::1])",
    free_order=True,
)
def exponentiate(values: Float32Array) -> float:
    """Replace `values` by exp(value − largest) and return their sum."""
    top = largest(values)
    total = np.float32(0.0)
    for j in range(values.shape[0]):
        weight = exp32(values[j] - top)
        values[j] = weight
        total += weight
    return float(total)


@compiled(
    "void(float32[:, :, ::1], float32[:, :, :, :, :, ::1], int64, int32[:, ::1], int32[::1],"
    " int32[::1], float64, int64, int64, float32[:, :, ::1])",
)
def paged_attention(
    q: Float32Array,
    kv_pool: Float32Array,
    layer: int,
    block_tables: Int32Array,
    token_rows: Int32Array,
    positions: Int32Array,
    scale: float,
    first_item: int,
    end_item: int,
    out: Float32Array,
) -> None:
    """Compute the work items first_item ≤ i < end_item, item i = (token i // G, kv head i % G)."""
    if first_item >= end_item:
        return
    num_kv_heads, block_size = kv_pool.shape[3], kv_pool.shape[4]
    group = q.shape[1] // num_kv_heads
    longest = 0
    for token in range(first_item // num_kv_heads, (end_item - 1) // num_kv_heads + 1):
        longest = max(longest, positions[token] + 1)
    scores = np.empty((group, longest), dtype=np.float32)
    for item in range(first_item, end_item):
        token, kv_head = item // num_kv_heads, item % num_kv_heads
        length = np.int64(positions[token]) + 1
        row = token_rows[token]
        heads = q[token, kv_head * group : (kv_head + 1) * group]
        acc = out[token, kv_head * group : (kv_head + 1) * group]
        for start in range(0, length, block_size):
            count = min(block_size, length - start)
            block = block_tables[row, start // block_size]
            keys = kv_pool[block, layer, 0, kv_head, :count]
            score_block(heads, keys, start, scale, scores)
        acc[:] = np.float32(0.0)
        totals = np.empty(group, dtype=np.float32)
        for p in range(group):
            totals[p] = exponentiate(scores[p, :length])
        for start in range(0, length, block_size):
            count = min(block_size, length - start)
            block = block_tables[row, start // block_size]
            accumulate_block(scores, kv_pool[block, layer, 1, kv_head, :count], start, acc)
        for p in range(group):
            inverse = np.float32(1.0) / totals[p]
            for d in range(acc.shape[1]):
                acc[p, d] *= inverse
