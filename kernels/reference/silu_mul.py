"""The gate of the feed-forward layer: silu(gate) · up (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array


def silu_mul(gate_up: Float32Array, out: Float32Array, *, turn: int | None = None) -> None:
    """Write gate / (1 + exp(−gate)) · up, row by row.

    `gate_up`: [T, 2·F]: F gate values, then F up values of each token; or, with a `turn`, so many
    of each one after the other. `out`: [T, F].
    """
    num_tokens, num_features = out.shape
    width = turn or num_features
    halves = gate_up.reshape(num_tokens, num_features // width, 2, width)
    gate, up = (halves[:, :, which].reshape(num_tokens, num_features) for which in (0, 1))
    with np.errstate(over="ignore"):  # exp of a large −gate is inf, and gate / inf is the right 0
        np.multiply(gate / (np.float32(1) + np.exp(-gate)), up, out=out)
