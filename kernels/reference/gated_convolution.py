"""Gated convolutions: layers that see a token and the few before it, each channel alone.

What a layer makes of a token's projections b, c and x:

    y    = Σ_j weight[j] · (b · x)[j]    over the last K tokens, the last one itself
    out  = c · y

(Liquid AI 2025, LFM2.) A sequence's *state* is b · x of the last K − 1 tokens. The sum begins with
the oldest token, so a result does not depend on how a sequence is cut into rows.

Array letters: T tokens of one row of a step; C channels; K the kernel's width.
"""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array


def gated_convolution(
    rows: Float32Array, weights: Float32Array, state: Float32Array
) -> Float32Array:
    """Return what the layer makes of a row's tokens, [T, C]; `state` goes on to their end.

    `rows`: [T, 3·C], a token's b, c, x. `weights`: [C, K], the last column is of the token itself.
    `state`: [K − 1, C], the oldest first; of a sequence without tokens zeros.
    """
    num_tokens, (channels, width) = len(rows), weights.shape
    let_in, let_out, x = (rows[:, i * channels : (i + 1) * channels] for i in range(3))
    behind = np.concatenate([state, let_in * x])
    sums = np.zeros((num_tokens, channels), np.float32)
    for place in range(width):
        sums += behind[place : place + num_tokens] * weights[:, place]
    state[:] = behind[num_tokens:]
    return np.asarray(let_out * sums, np.float32)
