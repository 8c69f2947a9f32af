"""What gates: silu(x) = x / (1 + e⁻ˣ), or GELU by tanh (Shazeer 2020; Hendrycks and Gimpel 2016).

In a third gate, of gpt-oss's experts, what is gated takes part as well
(`kernels.reference.clamped_mul`). Products gate their own outputs by these, and so does the launch
that gates alone (`gate_mul`).

    gelu(x) = ½ · x · (1 + tanh u) = x / (1 + e^(−2u))        u = √(2/π) · (x + 0.044715 · x³)

The second form has one exponential and loses nothing where tanh u is near −1.
"""

from __future__ import annotations

import math

from numba import cuda, float32

from kernels.cuda.instructions.conversions import exp2, reciprocal
from kernels.cuda.variant import DeviceFunction, Scalar
from kernels.reference import clamped_mul

MINUS_LOG2_E = float32(-math.log2(math.e))
LINEAR = float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
CUBIC = float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e) * 0.044715)

LIMIT = float32(clamped_mul.LIMIT)
MINUS_SLOPE_LOG2_E = float32(-clamped_mul.SLOPE * math.log2(math.e))


@cuda.jit(device=True, inline="always")
def silu(x: Scalar) -> Scalar:
    """Return it, float32. e⁻ˣ of a large −x is ∞, and x · 1/∞ the right zero."""
    return x * reciprocal(float32(1) + exp2(x * MINUS_LOG2_E))


@cuda.jit(device=True, inline="always")
def gelu(x: Scalar) -> Scalar:
    """Return it, float32. −2u, in powers of two, of a large −x is ∞, and so on as above."""
    return x * reciprocal(float32(1) + exp2(x * (LINEAR + CUBIC * x * x)))


@cuda.jit(device=True, inline="always")
def gate_silu(gate: Scalar, up: Scalar) -> Scalar:
    """Return silu(gate) · up."""
    return silu(gate) * up


@cuda.jit(device=True, inline="always")
def gate_gelu(gate: Scalar, up: Scalar) -> Scalar:
    """Return gelu(gate) · up."""
    return gelu(gate) * up


@cuda.jit(device=True, inline="always")
def at_most_limit(x: Scalar) -> Scalar:
    """Return the smaller one of x and LIMIT; a NaN stays one."""
    return LIMIT if x > LIMIT else x


@cuda.jit(device=True, inline="always")
def gate_clamped(gate: Scalar, up: Scalar) -> Scalar:
    """Return g · sigmoid(1.702 · g) · (u + 1), g and u clamped."""
    g = at_most_limit(gate)
    u = -at_most_limit(-at_most_limit(up))
    swish = g * reciprocal(float32(1) + exp2(g * MINUS_SLOPE_LOG2_E))
    return swish * (u + float32(1))


SILU = "silu"
CLAMPED = "clamped"
GATES: dict[str, DeviceFunction] = {SILU: gate_silu, "gelu": gate_gelu, CLAMPED: gate_clamped}
"""By the names of activations: what a gate makes of itself and what it gates."""
