"""What stands between the two products of an MLP without a gate: relu(x)² (So et al. 2021)."""

from __future__ import annotations

import numpy as np

from kernels.interface import Float32Array


def relu2(x: Float32Array, out: Float32Array) -> None:
    """Write relu(x)² into `out`, both float32 [T, I]."""
    np.maximum(x, np.float32(0), out=out)
    np.multiply(out, out, out=out)
