"""Float32 logits as integers that compare the same way, with the token they belong to.

    key   0 │ 32 bits that rise with the logit │ 31 bits that fall with the token id

Positive in int64. The largest key of a row names its largest logit and, among equals, the lowest
id; −0 and 0 are equal. `NOT_FINITE` is above all keys, so that it is the largest of a row in which
one logit is not finite; `NO_KEY` is below all.
"""

from __future__ import annotations

from numba import cuda, float32, int64, uint32

from kernels.cuda.instructions.conversions import float32_to_word, word_to_float32
from kernels.cuda.variant import Scalar

ID_BITS = 31
LAST_ID = (1 << ID_BITS) - 1
SIGN = uint32(0x80000000)
NOT_FINITE = (1 << 63) - 1
NO_KEY = -1


@cuda.jit(device=True, inline="always")
def rising_word(logit: Scalar) -> Scalar:
    """Return the 32 bits, uint32, that rise with the logit."""
    bits = float32_to_word(logit + float32(0))  # −0 + 0 = 0
    return bits ^ SIGN if bits < SIGN else ~bits


@cuda.jit(device=True, inline="always")
def key_of_word(rising: Scalar, token: Scalar) -> Scalar:
    """Return the key of a token whose logit has these bits."""
    return (int64(rising) << ID_BITS) | (LAST_ID - token)


@cuda.jit(device=True, inline="always")
def order_key(logit: Scalar, token: Scalar) -> Scalar:
    """Return the key of a finite logit."""
    return key_of_word(rising_word(logit), token)


@cuda.jit(device=True, inline="always")
def token_of_key(key: Scalar) -> Scalar:
    """Return the token id of a key."""
    return LAST_ID - (key & LAST_ID)


@cuda.jit(device=True, inline="always")
def logit_of_key(key: Scalar) -> Scalar:
    """Return the logit of a key, 0 for −0."""
    rising = uint32(key >> ID_BITS)
    return word_to_float32(rising ^ SIGN if rising >= SIGN else ~rising)
