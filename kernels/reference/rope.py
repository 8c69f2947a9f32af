"""Rotary position embedding and the write of K and V into the block pool, in one pass.

Some architectures change heads on their way there (`HeadChanges`): first a bias is added to all of
them, then query and key heads are normalised, each by itself, then these are rotated; then queries
grow, by their token's position.

Half-split convention (Hugging Face checkpoints): element d of a head is paired with d + D/2,
    out[d]       = x[d]       · cos[d] − x[d + D/2] · sin[d]
    out[d + D/2] = x[d + D/2] · cos[d] + x[d]       · sin[d]
(Su et al. 2021, RoFormer, with the dimensions permuted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.interface import Float32Array, Int64Array
from kernels.reference.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class HeadChanges:
    """What becomes of heads but for their rotation; None: nothing.

    `bias`: [(H + 2·G)·D], of a token's query, key and value heads. `norms`: [D] each, the weights
    of RMSNorm over a query head and over a key head; `eps`: of both. `growth`: [T], what queries of
    each token are multiplied by when they have turned. `are_joint`: norms are [H·D] and [G·D],
    of all heads together (`normed_together`). `norms_values`: value heads are normalised, too,
    without weights.
    """

    bias: Float32Array | None = None
    norms: tuple[Float32Array, Float32Array] | None = None
    eps: float = 0.0
    growth: Float32Array | None = None
    are_joint: bool = False
    norms_values: bool = False


def normed_together(
    qkv: Float32Array, norms: tuple[Float32Array, Float32Array], eps: float
) -> None:
    """Normalise all query heads of each token as one row, and all its key heads, in place.

    `qkv`: [T, (H + 2·G)·D]. `norms`: [H·D] and [G·D], the weights of RMSNorm; `eps`: of both.
    (OLMo Team 2024, 2 OLMo 2 Furious.)
    """
    first = 0
    for weight in norms:
        rows = qkv[:, first : first + len(weight)]
        rms_norm(rows.copy(), weight, eps, rows)
        first += len(weight)


UNCHANGED: Final = HeadChanges()


def rope_write_kv(
    qkv: Float32Array,
    cosines: Float32Array,
    sines: Float32Array,
    kv_pool: Float32Array,
    layer: int,
    kv_slots: Int64Array,
    out: Float32Array,
    changes: HeadChanges = UNCHANGED,
) -> None:
    """Rotate Q into `out`, and put rotated K and plain V into the pool; all with `changes`.

    `qkv`: [T, (H + 2·G)·D]: the H query heads, then G key heads, then G value heads of each token.
    `cosines`, `sines`: [T, D/2], of the angles of each token's position, both times the attention
    factor of the model's scaling (1 but for YaRN: Peng et al. 2023, section 3.4).
    `kv_pool`: [N, L, 2, G, B, D]; index 0 of the third axis is K, 1 is V. `layer`: below L.
    `kv_slots`: [T], block · B + offset in the block; no two tokens have the same.
    `out`: [T, H, D].
    """
    num_kv_heads, block_size, head_dim = kv_pool.shape[3:]
    num_tokens, num_heads = out.shape[:2]
    if changes.bias is not None:
        qkv = qkv + changes.bias
    if changes.norms is not None and changes.are_joint:
        qkv = qkv.copy()
        normed_together(qkv, changes.norms, changes.eps)
    heads = qkv.reshape(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    if changes.norms is not None and not changes.are_joint:
        queries = normed(queries, changes.norms[0], changes.eps)
        keys = normed(keys, changes.norms[1], changes.eps)
    out[:] = rotate(queries, cosines, sines)
    if changes.growth is not None:
        out *= changes.growth[:, None, None]
    keys = rotate(keys, cosines, sines)
    blocks, offsets = np.divmod(kv_slots, block_size)
    kv_pool[blocks, layer, 0, :, offsets] = keys
    values = heads[:, num_heads + num_kv_heads :]
    if changes.norms_values:
        values = normed(values, np.ones(head_dim, np.float32), changes.eps)
    kv_pool[blocks, layer, 1, :, offsets] = values


def normed(heads: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """Return `heads` [T, heads, D], each normalised by itself; `weight`: [D]."""
    rows = np.ascontiguousarray(heads).reshape(-1, heads.shape[2])
    out = np.empty_like(rows)
    rms_norm(rows, weight, eps, out)
    return out.reshape(heads.shape)


def rotate(x: Float32Array, cosines: Float32Array, sines: Float32Array) -> Float32Array:
    """Return `x` [T, heads, D] rotated by the angles of its tokens, [T, D/2] each."""
    low, high = np.split(x, 2, axis=2)
    cosines, sines = cosines[:, None], sines[:, None]
    return np.concatenate((low * cosines - high * sines, high * cosines + low * sines), axis=2)
