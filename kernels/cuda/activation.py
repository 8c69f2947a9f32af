"""What gates: silu(x) = x / (1 + e⁻ˣ), or GELU by tanh (Shazeer 2020; Hendrycks and Gimpel 2016).

    gelu(x) = ½ · x · (1 + tanh u) = x / (1 + e^(−2u))        u = √(2/π) · (x + 0.044715 · x³)

The second form has one exponential and loses nothing where tanh u is near −1.
"""

from __future__ import annotations

import math

from numba import cuda, float32

from kernels.cuda.instructions.conversions import exp2, reciprocal
from kernels.cuda.variant import DeviceFunction, Scalar

MINUS_LOG2_E = float32(-math.log2(math.e))
LINEAR = float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC = float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e) * 0.044715)


@cuda.jit(device=True, inline="always")
def silu(x: Scalar) -> Scalar:
    """Return it, float32. e⁻ˣ of a large −x is ∞, and x · 1/∞ the right zero."""
    return x * reciprocal(float32(1) + exp2(x * MINUS_LOG2_E))


@cuda.jit(device=True, inline="always")
def gelu(x: Scalar) -> Scalar:
    """Return it, float32. −2u, in powers of two, of a large −x is ∞, and so on as above."""
    return x * reciprocal(float32(1) + exp2(x * (LINEAR + CUBIC * x * x)))


ACTIVATIONS: dict[str, DeviceFunction] = {"silu": silu, "gelu": gelu}
"""By the names that models have for them."""
SILU = "silu"
