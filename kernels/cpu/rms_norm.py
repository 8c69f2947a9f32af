"""Root-mean-square normalisation; specification: `kernels.reference.rms_norm`."""

from __future__ import annotations

import math

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.interface import Float32Array


@compiled(
    "void(float32[:, ::1], float32[::1], float64, float32[:, ::1])",
    free_order=True,
)
def rms_norm(x: Float32Array, weight: Float32Array, eps: float, out: Float32Array) -> None:
    """Normalise each row of `x` [T, E] into `out`, which may be `x`."""
    num_tokens, hidden_size = x.shape
    for t in range(num_tokens):
        squares = np.float32(0.0)
        for e in range(hidden_size):
            squares += x[t, e] * x[t, e]
        scale = np.float32(1.0 / math.sqrt(squares / np.float32(hidden_size) + eps))
        for e in range(hidden_size):
            out[t, e] = x[t, e] * scale * weight[e]
