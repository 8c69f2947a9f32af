"""The gate of Gemma's feed-forward layer, as LLVM IR.

    gelu(x) = ½ · x · (1 + tanh u) = x / (1 + e^(−2u))        u = √(2/π) · (x + 0.044715 · x³)

The second form has one exponential and loses nothing where tanh u is near −1. Every step is rounded
once, so the bits are the same on every instruction set.
"""

from __future__ import annotations

import math
from typing import Final

from kernels.cpu.operands import RowFormat
from kernels.cpu.row_values import HIGHEST_EXPONENT, Pair, load_pair
from kernels.cpu.vector_ir import F32X, Builder, Value, call, constant, exp, fma

TWICE: Final = -2 * math.sqrt(2 / math.pi)
CUBED: Final = TWICE * 0.044715
"""−2u = x · (TWICE + CUBED · x²)."""


def gelu_gated(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
    """Return gelu(gate) · up; sources: gate, up."""
    gates, ups = (load_pair(builder, source) for source in sources)
    first, second = (
        builder.fmul(_gelu(builder, gate), up) for gate, up in zip(gates, ups, strict=True)
    )
    return first, second


def _gelu(builder: Builder, x: Value) -> Value:
    squared = builder.fmul(x, x)
    slope = fma(builder, squared, constant(F32X, CUBED), constant(F32X, TWICE))
    exponent = builder.fmul(x, slope)
    highest = constant(F32X, HIGHEST_EXPONENT)
    power = exp(builder, call(builder, "llvm.minnum.v16f32", F32X, [exponent, highest]))
    return builder.fdiv(x, builder.fadd(power, constant(F32X, 1.0)))
