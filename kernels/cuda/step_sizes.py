"""How far a token moves a state, and how much of it stays: β = sigmoid(b), α = e^(rate · softplus).

    softplus(y) = max(y, 0) + ln(1 + e^−|y|),  ln(1 + x) = 2 · artanh(x / (2 + x))

A state is multiplied by the α of all tokens behind the one that wrote it, thousands of numbers near
1: what they lose together is what one loses, times so many. So α comes from a polynomial that is
right to half a unit in the last place near 1, where the special-function unit would be off by up
to four. What it is a power of may be off by some units: that changes how fast a state fades by a
millionth.
"""

from __future__ import annotations

import math
from typing import Final

from numba import cuda, float32, uint32

from kernels.cuda.instructions.conversions import (
    exp2,
    float32_to_word,
    reciprocal,
    word_to_float32,
)
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_add, multiply_float32
from kernels.cuda.variant import Scalar

LOG2_E = float32(math.log2(math.e))
NUM_ARTANH: Final = 8
"""Terms of artanh(s) = s · (1 + s²/3 + s⁴/5 + …), s at most 1/3: what is left is below 2⁻²⁸."""
ARTANH = tuple(float32(1 / (2 * term + 1)) for term in reversed(range(NUM_ARTANH)))
NUM_EXP: Final = 8
"""Terms of eʳ, r within ± ln 2 / 2: what is left is below 2⁻²⁷."""
EXP = tuple(float32(1 / math.factorial(term)) for term in reversed(range(NUM_EXP)))
LN2_HIGH = float32(0.693359375)  # nine bits, so that its products with small integers are exact
LN2_LOW = float32(math.log(2) - 0.693359375)
ROUND = float32(1.5 * 2**23)  # added, and the last bits are those of a whole number
LEAST = float32(-87)  # of what it is lower than, e's power is no normal number, and 0 here
MANTISSA_BITS: Final = 23
ONE_BITS: Final = 0x3F80_0000


@cuda.jit(device=True, inline="always")
def sigmoid(x: Scalar) -> Scalar:
    """Return 1 / (1 + e⁻ˣ). e⁻ˣ of a large −x is ∞, and 1/∞ the right zero."""
    return reciprocal(add_float32(float32(1), exp2(multiply_float32(x, -LOG2_E))))


@cuda.jit(device=True, inline="always")
def softplus(x: Scalar) -> Scalar:
    """Return ln(1 + eˣ)."""
    power = exp2(multiply_float32(abs(x), -LOG2_E))
    s = multiply_float32(power, reciprocal(add_float32(float32(2), power)))
    square = multiply_float32(s, s)
    series = ARTANH[0]
    for term in range(1, NUM_ARTANH):
        series = multiply_add(series, square, ARTANH[term])
    positive = x if x > float32(0) else float32(0)
    return multiply_add(multiply_float32(float32(2), s), series, positive)


@cuda.jit(device=True, inline="always")
def exp_below_one(x: Scalar) -> Scalar:
    """Return eˣ of x ≤ 0, NaN of NaN."""
    rounded = multiply_add(x, LOG2_E, ROUND)
    n = add_float32(rounded, -ROUND)
    r = multiply_add(n, -LN2_HIGH, x)
    r = multiply_add(n, -LN2_LOW, r)
    series = EXP[0]
    for term in range(1, NUM_EXP):
        series = multiply_add(series, r, EXP[term])
    power = word_to_float32(uint32((float32_to_word(rounded) << MANTISSA_BITS) + ONE_BITS))
    return float32(0) if x < LEAST else multiply_float32(series, power)


@cuda.jit(device=True, inline="always")
def decay(time: Scalar, rate: Scalar) -> Scalar:
    """Return α; `time`: a and its bias, `rate`: below zero."""
    return exp_below_one(multiply_float32(rate, softplus(time)))
