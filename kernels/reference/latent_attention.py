"""Attention over latents: all heads read one row of each token, in place of keys and values each.

A token leaves one row of R + P elements: R of a *latent*, a normalised product of its hidden state,
and P that are rotated. What a head would make of the latent by matrices of its own, its key and its
value, is never made: the key's matrix is multiplied with the query instead, and the value's with
what attention gives (DeepSeek-AI 2024, DeepSeek-V2, section 2.1.2 and appendix C):

    score   q · (U_k · c)  =  (U_kᵀ · q) · c
    given   Σ w · (U_v · c)  =  U_v · (Σ w · c)

So attention is that of H query heads of R + P elements on a single key head, whose first R elements
are its values as well.

    row      ├──────────── latent, R ────────────┤── rotated, P ──┤
    query    ├─────────── U_kᵀ · q, R ───────────┤── rotated, P ──┤      H of them a token
    given    ├──────────── Σ w · c, R ───────────┤                       H of them a token

Of the rotated, element i is paired with i + P/2 (`kernels.reference.rope`).
"""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array, Int32Array, Int64Array
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rotate


def write_latents(
    inputs: Float32Array,
    turning: Float32Array,
    cosines: Float32Array,
    sines: Float32Array,
    weight: Float32Array,
    eps: float,
    pool: Float32Array,
    layer: int,
    kv_slots: Int64Array,
    queries: Float32Array,
) -> None:
    """Normalise latents and rotate what turns: tokens into the pool, query heads into queries.

    `inputs`: [T, R + P], a token's latent as its product gives it, and what of it turns. `turning`:
    [T, H, P], what of query heads turns. `cosines`, `sines`: [T, P/2], as in
    `kernels.reference.rope`. `weight`: [R], of RMSNorm over the latent; `eps`: its. `pool`:
    [N, L, B, R + P]. `kv_slots`: [T], block · B + offset; no two tokens have the same. `queries`:
    [T, H, R + P], of which the last P of each head are written.
    """
    rank, block_size = len(weight), pool.shape[2]
    rows = np.empty_like(inputs)
    latents = np.ascontiguousarray(inputs[:, :rank])
    normed = np.empty_like(latents)
    rms_norm(latents, weight, eps, normed)
    rows[:, :rank] = normed
    rows[:, rank:] = rotate(inputs[:, None, rank:], cosines, sines)[:, 0]
    blocks, offsets = np.divmod(kv_slots, block_size)
    pool[blocks, layer, offsets] = rows
    queries[:, :, rank:] = rotate(turning, cosines, sines)


def latent_attention(
    queries: Float32Array,
    pool: Float32Array,
    layer: int,
    block_tables: Int32Array,
    token_rows: Int32Array,
    positions: Int32Array,
    scale: float,
    out: Float32Array,
) -> None:
    """Write softmax(scale · q·rowsᵀ)·latents of all tokens to `out`.

    Token t belongs to row `token_rows[t]` and attends to positions 0 to `positions[t]` of that row,
    which lie where the row's block table says, as in `kernels.reference.paged_attention`.
    `queries`: [T, H, R + P]. `pool`: [N, L, B, R + P], rows of all positions already written; slots
    past a token's position are never read. `block_tables`: [S, M]. `out`: [T, H, R].
    """
    rank, block_size = out.shape[2], pool.shape[2]
    for token, position in enumerate(positions):
        length = int(position) + 1
        blocks = block_tables[token_rows[token], : -(-length // block_size)]
        rows = pool[blocks, layer].reshape(len(blocks) * block_size, -1)[:length]
        scores = np.float32(scale) * (queries[token] @ rows.T)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[token] = (weights @ rows[:, :rank]) / weights.sum(axis=1, keepdims=True)
