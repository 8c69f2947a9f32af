"""What the layers of a Gemma 4 E2B or E4B read of a token besides its hidden state, and add to it.

Source: `Gemma4TextModel` and `Gemma4TextDecoderLayer` in transformers ("per-layer embeddings").
"""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array
from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.rms_norm import rms_norm


def layer_inputs(
    projected: Float32Array, embedded: Float32Array, weight: Float32Array, eps: float
) -> Float32Array:
    """Return (rms_norm(projected) + embedded) / √2 of each token and layer, [T, L, P].

    `projected`: [T, L, P], of the token's row of the embedding, as the first layer reads it.
    `embedded`: [T, L, P], of the second embedding, times √P. `weight`: [P].
    """
    normed = np.empty_like(projected.reshape(-1, projected.shape[-1]))
    rms_norm(projected.reshape(normed.shape), weight, eps, normed)
    inputs: Float32Array = (normed.reshape(projected.shape) + embedded) * np.float32(0.5**0.5)
    return inputs


def gate_inputs(gates: Float32Array, inputs: Float32Array) -> Float32Array:
    """Return gelu(gate) · input, [T, P], of one layer's."""
    out = np.empty_like(gates)
    gelu_mul(np.concatenate([gates, inputs], axis=1), out)
    return out
