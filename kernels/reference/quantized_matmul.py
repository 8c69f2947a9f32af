"""The product of rows with a quantised weight matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.integer[Any]]


def quantized_matmul(
    x: Floats, quants: Integers, scales: Floats, minima: Floats | None, out: Floats
) -> None:
    """Write x · Wᵀ with W[n, k] = scales[n, k // group] · quants[n, k] + minima[n, k // group].

    `x`: [T, K]. `quants`: [N, K], what is multiplied: an offset of the stored form is taken off.
    `scales` and `minima` (None: zero): [N, K / group]. `out`: [T, N]. Everything is calculated in
    float64, the weights never rounded.
    """
    num_outputs, num_inputs = quants.shape
    num_groups = scales.shape[1]
    weights = quants.reshape(num_outputs, num_groups, -1).astype(np.float64)
    weights *= scales[:, :, None].astype(np.float64)
    if minima is not None:
        weights += minima[:, :, None].astype(np.float64)
    out[:] = x.astype(np.float64) @ weights.reshape(num_outputs, num_inputs).T
