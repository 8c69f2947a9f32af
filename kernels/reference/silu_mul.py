"""The gate of the feed-forward layer: silu(gate) · up (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array


def silu_mul(gate_up: Float32Array, out: Float32Array) -> None:
    """Write gate / (1 + exp(−gate)) · up, row by row.

    `gate_up`: [T, 2·F]: F gate values, then F up values of each token. `out`: [T, F].
    """
    gate, up = np.split(gate_up, 2, axis=1)
    with np.errstate(over="ignore"):  # exp of a large −gate is inf, and gate / inf is the right 0
        np.multiply(gate / (np.float32(1) + np.exp(-gate)), up, out=out)
