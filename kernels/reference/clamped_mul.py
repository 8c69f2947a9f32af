"""The gate of gpt-oss's experts, a SwiGLU whose inputs are clamped (Agarwal et al. 2025)."""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.interface import Float32Array
from kernels.reference.gate_halves import gate_and_up

LIMIT: Final = 7.0
"""`swiglu_limit`: of the gate from above, of what it gates from both sides."""
SLOPE: Final = 1.702
"""`swiglu_alpha`: x · sigmoid(1.702 · x) is nearly GELU (Hendrycks and Gimpel 2016)."""


def clamped_mul(gate_up: Float32Array, out: Float32Array, *, turn: int | None = None) -> None:
    """Write g / (1 + exp(−1.702 · g)) · (u + 1), row by row.

    g is the gate, 7 at most, and u what it gates, −7 to 7. `gate_up`: [T, 2·F] as `gate_and_up` has
    it. `out`: [T, F].
    """
    gate, up = gate_and_up(gate_up, turn)
    gate = np.minimum(gate, np.float32(LIMIT))
    up = np.clip(up, np.float32(-LIMIT), np.float32(LIMIT))
    with np.errstate(over="ignore"):  # exp of a large −gate is inf, and gate / inf is the right 0
        swish = gate / (np.float32(1) + np.exp(np.float32(-SLOPE) * gate))
    np.multiply(swish, up + np.float32(1), out=out)
