"""Mamba-2: layers that keep a state of fixed size in place of keys and values.

What a layer makes of a token's projections, the token's place being t:

    x, b, c  = silu(short_convolution(xbc) + bias)    over the last K tokens, each channel alone
    Δ, α     = softplus(d + time_bias),  exp(−e^A · Δ)         of each head
    S        = α · S + b ⊗ Δ · x
    y        = Sᵀ c + D · x
    out      = rms_norm(y · silu(z)) · weight                  of all heads of a group together
               or y · silu(z), in models without a norm there

(Dao and Gu 2024, Transformers are SSMs; as in Granite 4, with groups in Nemotron-H, and without a
norm in most of Falcon-H1.) The heads
of a group, which are neighbours, have the same b and c. A sequence's *state* is S of every head and
the last K − 1 rows that went into the convolution. Tokens are computed one after the other, so a
result does not depend on how a sequence is cut into rows.

Array letters: T tokens of one row of a step; H heads of P elements in G groups; N elements of b and
of c of a group; C = H·P + 2·G·N channels, those of x, then b of all groups, then c; K the kernel's
width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.interface import Float32Array
from kernels.reference.delta_net import silu


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """`convolution`: [C, K], the last column is of the token itself; `bias`: [C].

    `rates`: [H], −e^A. `time_bias`: [H], added to d. `skips`: [H], D. `norm`: [H·P], None if there
    is none; `eps`: of its RMSNorm. `num_groups`: G.
    """

    convolution: Float32Array
    bias: Float32Array
    rates: Float32Array
    time_bias: Float32Array
    skips: Float32Array
    norm: Float32Array | None
    eps: float
    num_groups: int = 1


@dataclass(frozen=True, slots=True)
class Mamba2State:
    """`inputs`: [K − 1, C], the rows before, the oldest first. `memory`: [H, N, P]."""

    inputs: Float32Array
    memory: Float32Array

    @classmethod
    def empty(cls, weights: Mamba2Weights, inner: int | None = None) -> Mamba2State:
        """Return that of a sequence without tokens. `inner`: H·P, where no norm says it."""
        (channels, width), num_heads = weights.convolution.shape, len(weights.rates)
        if inner is None:
            if weights.norm is None:
                raise ValueError("without a norm it must be said how wide all heads are")
            inner = len(weights.norm)
        size = (channels - inner) // (2 * weights.num_groups)
        shape = num_heads, size, inner // num_heads
        return cls(np.zeros((width - 1, channels), np.float32), np.zeros(shape, np.float32))


def mamba2(
    rows: Float32Array, steps: Float32Array, weights: Mamba2Weights, state: Mamba2State
) -> Float32Array:
    """Return what the layer makes of a row's tokens, [T, H·P]; `state` goes on to their end.

    `rows`: [T, C + H·P], a token's x, b, c before the convolution, and z. `steps`: [T, H], its d.
    """
    channels = len(weights.bias)
    x, b, c = convolved(rows[:, :channels], weights, state)
    times, decays = time_steps(steps, weights)
    y = scan(x, b, c, times, decays, weights.skips, state.memory)
    y, gates = y.reshape(len(rows), -1), rows[:, channels:]
    if weights.norm is None:
        return np.asarray(y * silu(gates), np.float32)
    return gated_norm(y, gates, weights.norm, weights.eps, weights.num_groups)


def convolved(
    inputs: Float32Array, weights: Mamba2Weights, state: Mamba2State
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Return x [T, H, P], b and c [T, G, N]; `inputs`: [T, C]."""
    num_tokens, width = len(inputs), weights.convolution.shape[1]
    num_heads, size, head_dim = state.memory.shape
    behind = np.concatenate([state.inputs, inputs])
    sums = np.zeros_like(inputs)
    for place in range(width):
        sums += behind[place : place + num_tokens] * weights.convolution[:, place]
    state.inputs[:] = behind[num_tokens:]
    inner = num_heads * head_dim
    of_groups = num_tokens, weights.num_groups, size
    ends = [inner, inner + weights.num_groups * size]
    x, b, c = np.split(silu(sums + weights.bias), ends, axis=1)
    return x.reshape(num_tokens, num_heads, head_dim), b.reshape(of_groups), c.reshape(of_groups)


def time_steps(steps: Float32Array, weights: Mamba2Weights) -> tuple[Float32Array, Float32Array]:
    """Return Δ and α of each token and head, [T, H]; `steps`: [T, H]."""
    times = np.logaddexp(np.float32(0), steps + weights.time_bias)
    return times, np.asarray(np.exp(weights.rates * times), np.float32)


def scan(
    x: Float32Array,
    b: Float32Array,
    c: Float32Array,
    times: Float32Array,
    decays: Float32Array,
    skips: Float32Array,
    memory: Float32Array,
) -> Float32Array:
    """Return y [T, H, P]; `memory` [H, N, P] becomes that behind the last token.

    `x`: [T, H, P]; `b`, `c`: [T, G, N], or [T, N] of one group; `times`, `decays`: [T, H], Δ and α;
    `skips`: [H].
    """
    out = np.empty_like(x)
    num_tokens, num_heads, _ = x.shape
    b, c = (
        np.repeat(each, num_heads // each.shape[1], axis=1)
        for each in (b.reshape(num_tokens, -1, b.shape[-1]), c.reshape(num_tokens, -1, c.shape[-1]))
    )
    for token in range(len(x)):
        memory *= decays[token][:, None, None]
        memory += b[token][:, :, None] * (times[token][:, None] * x[token])[:, None, :]
        out[token] = np.einsum("hnp,hn->hp", memory, c[token]) + skips[:, None] * x[token]
    return out


def gated_norm(
    y: Float32Array, gates: Float32Array, weight: Float32Array, eps: float, num_groups: int = 1
) -> Float32Array:
    """Return rms_norm(y · silu(gates)) · weight, all [T, H·P]; of each group by itself."""
    gated = (y * silu(gates)).reshape(len(y), num_groups, -1)
    squares = np.mean(gated * gated, axis=-1, keepdims=True)
    normed = (gated / np.sqrt(squares + np.float32(eps))).reshape(y.shape)
    return np.asarray(normed * weight, np.float32)
