"""Root-mean-square normalisation (Zhang and Sennrich 2019, without bias)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array


def rms_norm(x: Float32Array, weight: Float32Array, eps: float, out: Float32Array) -> None:
    """Write x · weight / sqrt(mean(x²) + eps), row by row.

    `x`: [T, E]. `weight`: [E]. `out`: [T, E], may be `x` itself.
    """
    mean_square = np.mean(np.square(x), axis=1, keepdims=True, dtype=np.float32)
    np.multiply(x / np.sqrt(mean_square + np.float32(eps)), weight, out=out)
