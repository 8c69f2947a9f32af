"""Exponential and logarithm in float64, defined down to the last bit.

Library functions differ by a unit in the last place from one processor or version to the next. The
ones here are written as single additions, multiplications and divisions, each rounded once and
never fused, in a fixed order: the same bits wherever IEEE 754 holds.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from kernels.interface import Float64Array

LOWEST: Final = -30.0
"""Arguments below count as this: 2^40 · e^−30 is still below 1."""
LOG2_E: Final = 1.4426950408889634
LN2_HIGH: Final = 6.93147180369123816490e-01
"""The upper 33 bits of ln 2: its product with a small integer is exact."""
LN2_LOW: Final = 1.90821492927058770002e-10
ROUND_BIAS: Final = 1.5 * 2.0**52
"""Adding it rounds to an integer, which then stands in the low bits."""
EXP_COEFFICIENTS: Final = tuple(1.0 / math.factorial(k) for k in range(12, -1, -1))
"""Taylor coefficients of e^r, the highest first; |r| ≤ ln 2 / 2, so what is left out is below
2^−52 of the result."""

LN2: Final = 0.6931471805599453
SQRT_HALF: Final = 0.7071067811865476
LOG_COEFFICIENTS: Final = tuple(2.0 / k for k in range(21, 0, -2))
"""Of log((1 + s) / (1 − s)) = 2·s + 2/3·s³ + 2/5·s⁵ + …, the highest first."""


def exp(x: Float64Array) -> Float64Array:
    """Return e^x for x ≤ 0, within 2 units in the last place; e^LOWEST for everything below.

    x = n·ln 2 + r, then 2^n times a polynomial for e^r. e^0 is exactly 1, nothing is above.
    """
    x = np.where(x > LOWEST, x, LOWEST)
    n = (x * LOG2_E + ROUND_BIAS) - ROUND_BIAS
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.full_like(x, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    return np.ldexp(p, n.astype(np.int32))


def log(x: float) -> float:
    """Return ln x for a positive, normal x, within 2 units in the last place of max(1, |ln x|).

    x = m·2^e with m in [√½, √2), s = (m − 1) / (m + 1), then the series above in s.
    """
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = m * 2.0, e - 1
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    p = LOG_COEFFICIENTS[0]
    for coefficient in LOG_COEFFICIENTS[1:]:
        p = p * square + coefficient
    return float(e) * LN2 + p * s
