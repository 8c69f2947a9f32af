"""Causal attention through block tables; prefill and decode are the same operation.

A batch is a flat list of tokens. Token t belongs to row `token_rows[t]` and attends to positions
0 to `positions[t]` of that row, whose keys and values lie where the row's block table says:
position p in block `block_tables[row, p // B]` at offset p % B. A decode row is a row with one
token, a prefill row has many; nothing here can tell them apart. (Kwon et al. 2023, PagedAttention.)
With a window of W it attends to the last W of those positions, its own among them. (Beltagy et al.
2020, Longformer; Jiang et al. 2023, Mistral 7B.)
A head may have a sink: a score that no position has, which takes part in the softmax and gives
nothing. (Xiao et al. 2023; Agarwal et al. 2025, gpt-oss.)
Scores may have a cap c: c · tanh(score / c) takes part. (Gemma Team 2024, Gemma 2.)
"""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array, Int32Array


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
    window: int | None = None,
    sinks: Float32Array | None = None,
    cap: float | None = None,
) -> None:
    """Write softmax(scale · q·Kᵀ)·V of some work items to their places in `out`.

    Item i is the pair (token i // G, kv head i % G) with the H / G query heads that share that kv
    head (grouped-query attention, Ainslie et al. 2023); the call computes the items
    first_item ≤ i < end_item and touches nothing else of `out`. All items: 0 to T·G.

    `q`, `out`: [T, H, D], H a multiple of G. `kv_pool`: [N, L, 2, G, B, D], K and V of all
    positions already written. `block_tables`: [S, M], read up to the block of the token's position.
    `token_rows`, `positions`: [T]. Slots past a token's position are never read, nor are blocks
    that lie before its window, of `window` positions (None: all): they may hold NaN. `sinks`: [H],
    scores, which `scale` does not multiply; None: heads have none. `cap`: of scaled scores; None:
    they have none.
    """
    num_kv_heads, block_size = kv_pool.shape[3:5]
    group = q.shape[1] // num_kv_heads
    for item in range(first_item, end_item):
        token, kv_head = divmod(item, num_kv_heads)
        length = int(positions[token]) + 1
        first = 0 if window is None else max(length - window, 0)
        first_block, end_block = first // block_size, -(-length // block_size)
        blocks = block_tables[token_rows[token], first_block:end_block]
        seen = slice(first - first_block * block_size, length - first_block * block_size)
        keys, values = (
            kv_pool[blocks, layer, which, kv_head].reshape(len(blocks) * block_size, -1)[seen]
            for which in (0, 1)
        )
        heads = slice(kv_head * group, (kv_head + 1) * group)
        scores = np.float32(scale) * (q[token, heads] @ keys.T)
        if cap is not None:
            scores = np.float32(cap) * np.tanh(scores / np.float32(cap))
        largest = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            largest = np.maximum(largest, sinks[heads, None])
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[heads, None] - largest)
        out[token, heads] = (weights @ values) / total
