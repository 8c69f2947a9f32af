"""A float32 exponential that the compiler can vectorise.

`math.exp` is a call into libm for each element; this one is a dozen operations without a branch,
which LLVM turns into full vector registers when a loop around it is inlined.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.cpu.compiled import compiled

LOWEST: Final = np.float32(-87.0)
HIGHEST: Final = np.float32(88.0)
LOG2_E: Final = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few bits, so its product with a small integer is exact.
LN2_HIGH: Final = np.float32(0.693359375)
LN2_LOW: Final = np.float32(-2.12194440e-4)
ROUND_BIAS: Final = np.float32(12582912.0)
"""1.5 · 2^23: adding it rounds to an integer, which then stands in the low mantissa bits."""
ROUND_BIAS_BITS: Final = np.int32(0x4B400000)
EXPONENT_BIAS: Final = np.int32(127)
MANTISSA_BITS: Final = np.int32(23)
C2: Final = np.float32(5.0000001201e-1)
C3: Final = np.float32(1.6666665459e-1)
C4: Final = np.float32(4.1665795894e-2)
C5: Final = np.float32(8.3334519073e-3)
C6: Final = np.float32(1.3981999507e-3)
C7: Final = np.float32(1.9875691500e-4)


@compiled(
    "float32(float32)",
)
def exp32(x: np.float32) -> np.float32:
    """Return e^x within 2 units in the last place; clamped to x in −87 to 88; NaN stays NaN.

    x = n·ln 2 + r with |r| ≤ ln 2 / 2, then e^x = 2^n · e^r with a polynomial for e^r (coefficients
    of the Cephes library's expf, Moshier 1989). Not compiled with `free_order`: it would cancel
    `ROUND_BIAS`.
    """
    if x < LOWEST:
        x = LOWEST
    if x > HIGHEST:
        x = HIGHEST
    biased = x * LOG2_E + ROUND_BIAS
    n = biased - ROUND_BIAS
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = C7
    p = p * r + C6
    p = p * r + C5
    p = p * r + C4
    p = p * r + C3
    p = p * r + C2
    p = p * (r * r) + r + np.float32(1.0)
    exponent = np.float32(biased).view(np.int32) - ROUND_BIAS_BITS + EXPONENT_BIAS
    return p * np.int32(exponent << MANTISSA_BITS).view(np.float32)
