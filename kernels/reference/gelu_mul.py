"""The gate of the feed-forward layer of Gemma: gelu(gate) · up (Shazeer 2020, GEGLU)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array
from kernels.reference.gate_halves import gate_and_up


def gelu_mul(gate_up: Float32Array, out: Float32Array, *, turn: int | None = None) -> None:
    """Write ½ · gate · (1 + tanh(√(2/π) · (gate + 0.044715 · gate³))) · up, row by row.

    This is the approximation of GELU by tanh (Hendrycks and Gimpel 2016). `gate_up`: [T, 2·F] as
    `gate_and_up` has it. `out`: [T, F].
    """
    gate, up = gate_and_up(gate_up.astype(np.float64), turn)  # 1 + tanh cancels
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    out[:] = 0.5 * gate * (1 + np.tanh(inner)) * up
