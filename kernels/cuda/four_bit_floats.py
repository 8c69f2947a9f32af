"""How the four-bit floats of MXFP4 stand in a word, for few instructions to make 16-bit floats.

A code q (`kernels.reference.four_bit_floats`) is a float of a sign, two bits of exponent and one of
fraction, s e e f. As these bits of a bfloat16 it is itself times 2⁻¹²⁶, what is below 1 being
subnormal in both:

    bfloat16    bit 15  14 … 9  8 7  6  5 … 0
                     s    0     e e  f    0

A word has eight codes, pairs j = 0 … 3, those of a pair 16 bits apart. So a pair is as good as
widened where its bits lie like that in both halves of the word, however much the word is rotated:

    pair 0    bits 15, 8, 7, 6 of each half
    pair 1    the same, rotated to the left by 3
    pair 2    by 6
    pair 3    what they leave, bits 3, 1, 0 and 4: one multiplication by 2¹² + 2⁷ + 2² takes these
              to their places, and adds nothing to where another one is

`instructions.small_floats` takes them up; `placed` and `taken_up` are for whoever packs.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kernels.cuda.errors import UnsupportedVariantError
from kernels.reference import four_bit_floats
from kernels.reference.four_bit_floats import EXPONENT_BIAS, NOT_A_NUMBER

Array = npt.NDArray[Any]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]

ROTATIONS: Final = (0, 3, 6)
"""Of pairs 0 to 2."""
LAST_PAIR: Final = 0x001B001B
"""The bits of pair 3."""
LAST_FACTOR: Final = 1 << 12 | 1 << 7 | 1 << 2
"""What takes them to their places."""
WIDENED: Final = 0x81C081C0
"""The bits of a pair of bfloat16."""
MAGNITUDES: Final = 0x01C001C0
"""Those but for the signs."""

DOUBLED: Final = np.array(four_bit_floats.DOUBLED, np.int8)
"""What codes stand for, doubled."""


def placed(words: UInt32Array) -> UInt32Array:
    """Return words as drawn above; `words`: the codes of pair j at bits 4·j and 4·j + 16."""
    out = np.zeros_like(words)
    for j, rotation in enumerate(ROTATIONS):
        codes = words >> np.uint32(4 * j) & np.uint32(0x000F000F)
        pair = (codes & np.uint32(0x00080008)) << np.uint32(12)
        pair |= (codes & np.uint32(0x00070007)) << np.uint32(6)
        out |= _rotated(pair, rotation)
    codes = words >> np.uint32(12)
    out |= codes & np.uint32(0x00080008)
    out |= (codes & np.uint32(0x00060006)) >> np.uint32(1)
    out |= (codes & np.uint32(0x00010001)) << np.uint32(4)
    return out


def taken_up(words: UInt32Array) -> UInt32Array:
    """Return what was `placed`."""
    out = np.zeros_like(words)
    for j, rotation in enumerate(ROTATIONS):
        pair = _rotated(words, 32 - rotation)
        codes = pair >> np.uint32(12) & np.uint32(0x00080008)
        codes |= pair >> np.uint32(6) & np.uint32(0x00070007)
        out |= codes << np.uint32(4 * j)
    codes = words & np.uint32(0x00080008)
    codes |= (words & np.uint32(0x00030003)) << np.uint32(1)
    codes |= words >> np.uint32(4) & np.uint32(0x00010001)
    return out | codes << np.uint32(12)


def codes_of(doubled: Array) -> UInt8Array:
    """Return the codes of numbers, int8, that are twice a float of four bits.

    Raises UnsupportedVariantError for others.
    """
    places = np.argsort(DOUBLED, kind="stable")
    found = np.searchsorted(DOUBLED, doubled, sorter=places)
    codes = places[np.minimum(found, len(places) - 1)].astype(np.uint8)
    wrong = DOUBLED[codes] != doubled
    if wrong.any():
        given = int(doubled[wrong][0])
        raise UnsupportedVariantError("quants", "twice a float of four bits", given)
    return codes


def exponents_of(halves: Array) -> UInt8Array:
    """Return the bytes of scales; `halves`: half of what they stand for. Of NaN 255.

    Raises UnsupportedVariantError for what is no power of two that a byte stands for.
    """
    fractions, exponents = np.frexp(halves.astype(np.float64))
    exponents = exponents + EXPONENT_BIAS
    is_power = (fractions == 1 / 2) & (exponents >= 0) & (exponents < NOT_A_NUMBER)
    wrong = ~is_power & ~np.isnan(halves)
    if wrong.any():
        allowed = "a power of two from 2^-128 to 2^126"
        raise UnsupportedVariantError("scales", allowed, float(halves[wrong][0]))
    return np.where(is_power, exponents, NOT_A_NUMBER).astype(np.uint8)


def half_scales(exponents: UInt8Array) -> npt.NDArray[np.float32]:
    """Return half of what the bytes of scales stand for."""
    halves = np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS - 1)
    halves[exponents == NOT_A_NUMBER] = np.nan
    return halves.astype(np.float32)


def _rotated(words: UInt32Array, left: int) -> UInt32Array:
    if left % 32 == 0:
        return words
    rotated: UInt32Array = words << np.uint32(left) | words >> np.uint32(32 - left)
    return rotated
