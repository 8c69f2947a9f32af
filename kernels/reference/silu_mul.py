"""The gate of the feed-forward layer: silu(gate) · up (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array
from kernels.reference.gate_halves import gate_and_up


def silu_mul(gate_up: Float32Array, out: Float32Array, *, turn: int | None = None) -> None:
    """Write gate / (1 + exp(−gate)) · up, row by row.

    `gate_up`: [T, 2·F] as `gate_and_up` has it. `out`: [T, F].
    """
    gate, up = gate_and_up(gate_up, turn)
    with np.errstate(over="ignore"):  # exp of a large −gate is inf, and gate / inf is the right 0
        np.multiply(gate / (np.float32(1) + np.exp(-gate)), up, out=out)
