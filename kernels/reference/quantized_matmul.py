"""Quantised weight matrices: their values, and the product of rows with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.integer[Any]]


def dequantized(quants: Integers, scales: Floats, minima: Floats | None, out: Floats) -> None:
    """Write W[n, k] = scales[n, k // group] · quants[n, k] + minima[n, k // group].

    `quants`: [N, K], what is multiplied: an offset of the stored form is taken off. `scales` and
    `minima` (None: zero): [N, K / group]. `out`: [N, K], C-contiguous; its dtype is calculated in.
    """
    num_outputs, num_groups = scales.shape
    grouped = out.reshape(num_outputs, num_groups, -1)
    grouped[:] = quants.reshape(grouped.shape)
    grouped *= scales[:, :, None].astype(out.dtype)
    if minima is not None:
        grouped += minima[:, :, None].astype(out.dtype)


def quantized_matmul(
    x: Floats, quants: Integers, scales: Floats, minima: Floats | None, out: Floats
) -> None:
    """Write x · Wᵀ with W as above.

    `x`: [T, K]. `out`: [T, N]. Everything is calculated in float64, the weights never rounded.
    """
    weights: Floats = np.empty(quants.shape, np.float64)
    dequantized(quants, scales, minima, weights)
    out[:] = x.astype(np.float64) @ weights.T
