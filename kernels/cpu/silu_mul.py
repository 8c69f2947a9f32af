"""The gate of the feed-forward layer; specification: `kernels.reference.silu_mul`."""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from kernels.cpu.exponential import exp32
from kernels.interface import Float32Array


@compiled(
    "void(float32[:, ::1], float32[:, ::1])",
)
def silu_mul(gate_up: Float32Array, out: Float32Array) -> None:
    """Write silu(gate) · up of each row of `gate_up` [T, 2·F] to `out` [T, F]."""
    num_tokens, width = out.shape
    for t in range(num_tokens):
        for f in range(width):
            gate = gate_up[t, f]
            out[t, f] = gate / (np.float32(1.0) + exp32(-gate)) * gate_up[t, width + f]
