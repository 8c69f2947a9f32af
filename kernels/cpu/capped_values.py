"""Numbers that stay below a cap, as LLVM IR: c · tanh(x / c) (Gemma 2 and 4).

Below 1 tanh is the beginning of Lambert's continued fraction, above it what it is short of 1:

    u = x / c   |u| < 1   x · (945 + 105·u² + u⁴) / (945 + 420·u² + 15·u⁴)
                else      ± (c − 2 · c / (1 + e^(2·|u|)))

So nothing cancels, however small x or large c is. No sum is left whose product the compiler might
fuse with it, so the bits are the same on every instruction set. A NaN stays one; what is infinite
becomes the cap.
"""

from __future__ import annotations

import math
from typing import Final

from kernels.cpu.vector_ir import (
    F32,
    F32X,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    fma,
    power_of_two,
)

TWICE_LOG2_E: Final = 2 * math.log2(math.e)
HIGHEST: Final = 100.0
"""Powers of 2 beyond which a number is the cap."""


def capped(builder: Builder, cap: Value, values: list[Value]) -> list[Value]:
    """Return vectors of float32 with their cap, a float32 that is not 0."""
    caps = broadcast(builder, cap)
    twice = broadcast(builder, builder.fadd(cap, cap))
    inverse = broadcast(builder, builder.fdiv(F32(1.0), cap))

    def number(value: float) -> Value:
        return constant(F32X, value)

    def of(x: Value) -> Value:
        u = builder.fmul(x, inverse)
        size = call(builder, "llvm.fabs.v16f32", F32X, [u])
        square = builder.fmul(u, u)
        above = fma(builder, square, number(105), number(945))
        above = fma(builder, square, square, above)
        below = fma(builder, square, number(15), number(420))
        below = fma(builder, square, below, number(945))
        exponent = builder.fmul(size, number(TWICE_LOG2_E))
        is_high = builder.fcmp_ordered(">", exponent, number(HIGHEST))
        power = power_of_two(builder, builder.select(is_high, number(HIGHEST), exponent))
        is_near = builder.fcmp_ordered("<", size, number(1))
        over = builder.select(is_near, builder.fmul(x, above), twice)
        under = builder.select(is_near, below, builder.fadd(power, number(1)))
        quotient = builder.fdiv(over, under)
        far = call(builder, "llvm.copysign.v16f32", F32X, [builder.fsub(caps, quotient), x])
        return builder.select(is_near, quotient, far)

    return [of(x) for x in values]
