"""Philox4x32-10 on the device: the numbers of `kernels.reference.philox`, bit for bit."""

from __future__ import annotations

from numba import cuda, float64, uint64

from kernels.cuda.variant import Scalar
from kernels.reference.philox import KEY_STEPS, MULTIPLIERS, ROUNDS

_WORD, _SHIFT = uint64(0xFFFFFFFF), uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = uint64(MULTIPLIERS[0]), uint64(MULTIPLIERS[1])
_KEY_STEP_0, _KEY_STEP_1 = uint64(KEY_STEPS[0]), uint64(KEY_STEPS[1])
_HIGH_SHIFT, _LOW_SHIFT, _LOW_BITS = uint64(5), uint64(6), uint64(26)
_UNIT = float64(2.0**-53)


@cuda.jit(device=True, inline="always")
def uniform(seed: Scalar, sample_index: Scalar, position: Scalar) -> Scalar:
    """Return the number in [0, 1), float64, that belongs to a sample of a request at a position."""
    c0, c1 = position & _WORD, position >> _SHIFT
    c2, c3 = sample_index & _WORD, uint64(0)
    k0, k1 = seed & _WORD, seed >> _SHIFT
    for _ in range(ROUNDS):
        product0, product1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1 = (product1 >> _SHIFT) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = (product0 >> _SHIFT) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + _KEY_STEP_0) & _WORD, (k1 + _KEY_STEP_1) & _WORD
    # 53 bits: exact in float64, and so is the division by a power of two.
    return float64(((c0 >> _HIGH_SHIFT) << _LOW_BITS) | (c1 >> _LOW_SHIFT)) * _UNIT
