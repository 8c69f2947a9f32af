"""silu(x) = x / (1 + e⁻ˣ), which gates (Shazeer 2020)."""

from __future__ import annotations

import math

from numba import cuda, float32

from kernels.cuda.instructions.conversions import exp2, reciprocal
from kernels.cuda.variant import Scalar

MINUS_LOG2_E = float32(-math.log2(math.e))


@cuda.jit(device=True, inline="always")
def silu(x: Scalar) -> Scalar:
    """Return it, float32. e⁻ˣ of a large −x is ∞, and x · 1/∞ the right zero."""
    return x * reciprocal(float32(1) + exp2(x * MINUS_LOG2_E))
