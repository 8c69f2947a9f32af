"""Gated DeltaNet: layers that keep a state of fixed size in place of keys and values.

What a layer makes of a token's projections, the token's place being t:

    q, k, v      = silu(short_convolution(x))             over the last K tokens, each channel alone
    q, k         = q / |q| / √Dk,  k / |k|                of each key head
    β, α         = sigmoid(b),  exp(−e^A · softplus(a + dt))   of each value head, in (0, 1)
    S            = α · S + k ⊗ β · (v − (α · S)ᵀ k)       what k recalls is replaced by v, in part
    o            = Sᵀ q
    out          = rms_norm(o) · weight · silu(z)         of each value head

(Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks; as in Qwen3-Next and Qwen3.5.) Value head j
has key head j // (Hv / Hk), or j mod Hk where heads are *tiled*. A sequence's *state* is S of every
value head and the last K − 1 rows that went into the convolution. Tokens are computed one after the
other, so a result does not depend on how a sequence is cut into rows.

Array letters: T tokens of one row of a step; Hk, Hv key and value heads of Dk and Dv elements;
C = 2·Hk·Dk + Hv·Dv channels, those of q, then k, then v; K the kernel's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.interface import Float32Array

LENGTH_EPSILON = np.float32(1e-6)
"""Added to the square of a key's and of a query's length."""


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """`convolution`: [C, K], the last column is of the token itself. `rates`: [Hv], −e^A.

    `time_bias`: [Hv], added to a. `norm`: [Dv]; `eps`: of its RMSNorm. `num_key_heads`: Hk.
    `are_tiled`: which key head a value head has.
    """

    convolution: Float32Array
    rates: Float32Array
    time_bias: Float32Array
    norm: Float32Array
    eps: float
    num_key_heads: int
    are_tiled: bool = False


@dataclass(frozen=True, slots=True)
class DeltaNetState:
    """`inputs`: [K − 1, C], the rows before, the oldest first. `memory`: [Hv, Dk, Dv]."""

    inputs: Float32Array
    memory: Float32Array

    @classmethod
    def empty(cls, weights: DeltaNetWeights) -> DeltaNetState:
        """Return that of a sequence without tokens."""
        (channels, width), (value_size,) = weights.convolution.shape, weights.norm.shape
        num_value_heads = len(weights.rates)
        key_size = (channels - num_value_heads * value_size) // (2 * weights.num_key_heads)
        return cls(
            np.zeros((width - 1, channels), np.float32),
            np.zeros((num_value_heads, key_size, value_size), np.float32),
        )


def delta_net(
    rows: Float32Array,
    gates: Float32Array,
    weights: DeltaNetWeights,
    state: DeltaNetState,
) -> Float32Array:
    """Return what the layer makes of a row's tokens, [T, Hv·Dv]; `state` goes on to their end.

    `rows`: [T, C + Hv·Dv], a token's q, k, v before the convolution, and z. `gates`: [T, 2·Hv], its
    b, then a.
    """
    channels = len(weights.convolution)
    queries, keys, values = convolved(rows[:, :channels], weights, state)
    factors, decays = step_sizes(gates, weights)
    num_heads = values.shape[1]
    queries, keys = (heads[:, key_heads(num_heads, weights)] for heads in (queries, keys))
    out = delta_rule(queries, keys, values, factors, decays, state.memory)
    return gated_norm(out, rows[:, channels:].reshape(out.shape), weights.norm, weights.eps)


def key_heads(num_value_heads: int, weights: DeltaNetWeights) -> npt.NDArray[np.intp]:
    """Return the key head of each value head, [Hv]."""
    heads = np.arange(num_value_heads)
    count = weights.num_key_heads
    return heads % count if weights.are_tiled else heads // (num_value_heads // count)


def convolved(
    inputs: Float32Array, weights: DeltaNetWeights, state: DeltaNetState
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Return q [T, Hk, Dk] and k of length 1 (q / √Dk), and v [T, Hv, Dv]; `inputs`: [T, C]."""
    num_tokens, width = len(inputs), weights.convolution.shape[1]
    num_value_heads, key_size, value_size = state.memory.shape
    behind = np.concatenate([state.inputs, inputs])
    sums = np.zeros_like(inputs)
    for place in range(width):
        sums += behind[place : place + num_tokens] * weights.convolution[:, place]
    state.inputs[:] = behind[num_tokens:]
    rows = silu(sums)
    of_keys = weights.num_key_heads * key_size
    queries, keys = (
        with_length_one(part.reshape(num_tokens, weights.num_key_heads, key_size))
        for part in (rows[:, :of_keys], rows[:, of_keys : 2 * of_keys])
    )
    values = rows[:, 2 * of_keys :].reshape(num_tokens, num_value_heads, value_size)
    return queries * np.float32(key_size**-0.5), keys, values


def with_length_one(heads: Float32Array) -> Float32Array:
    """Return heads [T, H, D] divided by their lengths."""
    squares = np.sum(heads * heads, axis=-1, keepdims=True)
    return np.asarray(heads / np.sqrt(squares + LENGTH_EPSILON), np.float32)


def step_sizes(gates: Float32Array, weights: DeltaNetWeights) -> tuple[Float32Array, Float32Array]:
    """Return β and α of each token and value head, [T, Hv]; `gates`: [T, 2·Hv]."""
    num_value_heads = len(weights.rates)
    factors = sigmoid(gates[:, :num_value_heads])
    times = np.logaddexp(np.float32(0), gates[:, num_value_heads:] + weights.time_bias)
    return factors, np.asarray(np.exp(weights.rates * times), np.float32)


def delta_rule(
    queries: Float32Array,
    keys: Float32Array,
    values: Float32Array,
    factors: Float32Array,
    decays: Float32Array,
    memory: Float32Array,
) -> Float32Array:
    """Return o [T, Hv, Dv]; `memory` [Hv, Dk, Dv] becomes that behind the last token.

    `queries`, `keys`: [T, Hv, Dk], of each value head its key head's; `values`: [T, Hv, Dv];
    `factors`, `decays`: [T, Hv], β and α.
    """
    out = np.empty_like(values)
    for token in range(len(values)):
        q, k = queries[token], keys[token]
        memory *= decays[token][:, None, None]
        recalled = np.einsum("hkv,hk->hv", memory, k)
        changes = (values[token] - recalled) * factors[token][:, None]
        memory += k[:, :, None] * changes[:, None, :]
        out[token] = np.einsum("hkv,hk->hv", memory, q)
    return out


def gated_norm(
    heads: Float32Array, gates: Float32Array, weight: Float32Array, eps: float
) -> Float32Array:
    """Return rms_norm(heads) · weight · silu(gates), each head by itself, as [T, Hv·Dv]."""
    squares = np.mean(heads * heads, axis=-1, keepdims=True)
    normed = heads / np.sqrt(squares + np.float32(eps)) * weight
    return np.asarray(normed * silu(gates), np.float32).reshape(len(heads), -1)


def gate_attended(attended: Float32Array, gates: Float32Array) -> Float32Array:
    """Return what attention gave times the sigmoid of its gates; both [T, H·D]."""
    return np.asarray(attended * sigmoid(gates), np.float32)


def silu(x: Float32Array) -> Float32Array:
    """Return x · sigmoid(x)."""
    return np.asarray(x * sigmoid(x), np.float32)


def sigmoid(x: Float32Array) -> Float32Array:
    """Return 1 / (1 + e^−x)."""
    with np.errstate(over="ignore"):
        return np.asarray(np.float32(1) / (np.float32(1) + np.exp(-x)), np.float32)
