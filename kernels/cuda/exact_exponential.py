"""Exponential and logarithm in float64 with the very bits of `kernels.reference.exponential`.

Device functions: kernels call them, the compiler puts them in place.
"""

from __future__ import annotations

from numba import cuda, float64, int64

from kernels.cuda.instructions.exact_float64 import (
    add_float64,
    bits_to_float64,
    divide_float64,
    float64_to_bits,
    multiply_float64,
)
from kernels.cuda.variant import Scalar
from kernels.reference import exponential as reference

WEIGHT_ONE = float64(2.0**40)

_LOWEST, _LOG2_E = float64(reference.LOWEST), float64(reference.LOG2_E)
_MINUS_LN2_HIGH, _MINUS_LN2_LOW = float64(-reference.LN2_HIGH), float64(-reference.LN2_LOW)
_ROUND_BIAS, _LN2 = float64(reference.ROUND_BIAS), float64(reference.LN2)
_SQRT_HALF = float64(reference.SQRT_HALF)
_EXPONENT_BIAS, _MANTISSA_BITS = 1023, 52
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_EXP_COEFFICIENTS = reference.EXP_COEFFICIENTS
_LOG_COEFFICIENTS = reference.LOG_COEFFICIENTS
_NUM_EXP, _NUM_LOG = len(_EXP_COEFFICIENTS), len(_LOG_COEFFICIENTS)


@cuda.jit(device=True, inline="always")
def exact_exp(x: Scalar) -> Scalar:
    """Return eˣ for x ≤ 0; e^LOWEST for everything below LOWEST."""
    x = max(x, _LOWEST)
    n = add_float64(add_float64(multiply_float64(x, _LOG2_E), _ROUND_BIAS), -_ROUND_BIAS)
    r = add_float64(x, multiply_float64(n, _MINUS_LN2_HIGH))
    r = add_float64(r, multiply_float64(n, _MINUS_LN2_LOW))
    p = _EXP_COEFFICIENTS[0]
    for i in range(1, _NUM_EXP):
        p = add_float64(multiply_float64(p, r), _EXP_COEFFICIENTS[i])
    # 2ⁿ is a normal number, n ≥ -44, so that this product is exact.
    return multiply_float64(p, bits_to_float64((int64(n) + _EXPONENT_BIAS) << _MANTISSA_BITS))


@cuda.jit(device=True, inline="always")
def exact_log(x: Scalar) -> Scalar:
    """Return ln x of a positive, normal x."""
    bits = float64_to_bits(x)
    # x = m · 2^e with m in [½, 1), as frexp has it.
    e = (bits >> _MANTISSA_BITS) - (_EXPONENT_BIAS - 1)
    half = (_EXPONENT_BIAS - 1) << _MANTISSA_BITS
    m = bits_to_float64((bits & _MANTISSA_MASK) | half)
    if m < _SQRT_HALF:
        m = multiply_float64(m, float64(2))
        e -= 1
    s = divide_float64(add_float64(m, float64(-1)), add_float64(m, float64(1)))
    square = multiply_float64(s, s)
    p = _LOG_COEFFICIENTS[0]
    for i in range(1, _NUM_LOG):
        p = add_float64(multiply_float64(p, square), _LOG_COEFFICIENTS[i])
    return add_float64(multiply_float64(float64(e), _LN2), multiply_float64(p, s))


@cuda.jit(device=True, inline="always")
def integer_weight(logit: Scalar, largest: Scalar, inverse_temperature: Scalar) -> Scalar:
    """Return floor(e^((logit − largest) / temperature) · 2^40), as int64."""
    shifted = add_float64(float64(logit), -float64(largest))
    return int64(
        multiply_float64(exact_exp(multiply_float64(shifted, inverse_temperature)), WEIGHT_ONE)
    )
