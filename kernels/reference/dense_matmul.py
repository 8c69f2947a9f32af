"""The product of rows with a weight matrix, and what a layer does before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.reference.gate_mul import GATE_MUL

Floats = npt.NDArray[np.floating[Any]]


def normalised(
    x: Floats, weight: Floats, eps: float, stored: Callable[[Floats], Floats] = np.asarray
) -> Floats:
    """Return x · weight / √(mean(x²) + eps), row by row, in float64. `x`: [T, K].

    `stored`: what x · weight becomes before it is divided.
    """
    x = x.astype(np.float64)
    mean_square = np.mean(np.square(x), axis=1, keepdims=True)
    product: Floats = stored(x * weight) / np.sqrt(mean_square + eps)
    return product


def dense_matmul(x: Floats, weights: Floats) -> Floats:
    """Return x · Wᵀ in float64. `x`: [T, K]. `weights`: [N, K]."""
    product: Floats = x.astype(np.float64) @ weights.astype(np.float64).T
    return product


def gated(gate_up: Floats, activation: str) -> Floats:
    """Return a(gate) · up; `gate_up`: [T, 2·F], F gate values first."""
    product = np.empty((len(gate_up), gate_up.shape[1] // 2), gate_up.dtype)
    GATE_MUL[activation](gate_up, product)
    return product
