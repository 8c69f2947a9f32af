"""Sigmoid and softplus of vectors, as LLVM IR.

    sigmoid(x)   1 / (1 + e^−x)
    softplus(x)  max(x, 0) + ln(1 + e^−|x|)

ln(1 + y) is 2·artanh(s) with s = y / (2 + y), at most 1/3: 2 · (s + s³/3 + s⁵/5 + …). Every step is
rounded once, so the bits are the same on every instruction set. NaN stays NaN, and no number
becomes one.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.row_values import HIGHEST_EXPONENT
from kernels.cpu.vector_ir import F32X, Builder, Value, call, constant, exp, fma

NUM_TERMS: Final = 8
"""Of the series of artanh: what is left of it is below 2^-27 of the sum."""


def sigmoid(builder: Builder, x: Value) -> Value:
    """Return 1 / (1 + e^−x); below −88 that of −88, about 6e-39."""
    return _or_nan(builder, x, builder.fdiv(constant(F32X, 1.0), _divisor(builder, x)))


def softplus(builder: Builder, x: Value) -> Value:
    """Return ln(1 + e^x) of numbers and infinities."""
    size = call(builder, "llvm.fabs.v16f32", F32X, [x])
    y = exp(builder, builder.fneg(size))
    s = builder.fdiv(y, builder.fadd(y, constant(F32X, 2.0)))
    squared = builder.fmul(s, s)
    series: Value = constant(F32X, 1 / (2 * NUM_TERMS - 1))
    for term in reversed(range(NUM_TERMS - 1)):
        series = fma(builder, series, squared, constant(F32X, 1 / (2 * term + 1)))
    zero = constant(F32X, 0.0)
    positive = builder.select(builder.fcmp_ordered(">", x, zero), x, zero)
    twice = builder.fmul(s, constant(F32X, 2.0))
    return _or_nan(builder, x, fma(builder, twice, series, positive))


def _divisor(builder: Builder, x: Value) -> Value:
    """Return 1 + e^−x, of NaN a number."""
    highest = constant(F32X, HIGHEST_EXPONENT)
    power = exp(builder, call(builder, "llvm.minnum.v16f32", F32X, [builder.fneg(x), highest]))
    return builder.fadd(power, constant(F32X, 1.0))


def _or_nan(builder: Builder, x: Value, result: Value) -> Value:
    """Return the result, of NaN NaN."""
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)
