"""Scores that stay below a cap c: s becomes c · tanh(s / c) (Gemma 2).

Kernels have scores as powers of two, x = s · log2 e, and their cap likewise, C = c · log2 e.

*16 bits.* A score is a product of query and key until it meets its factor, which makes x of it.
With a cap it is its share of that, and C is the factor of all:

    tanh(s / c) = 1 − 2 / (1 + 2^z) = 1 − 1 / (½ + 2^(z − 1)),    z = 2 · log2 e / C · x

z is the product times one number, too. So a cap takes two visits to the special-function unit and
three instructions a score. Far out the power is ∞ or 0, and the share 1 or −1. What is lost is
some 10⁻⁷ of C.

By count, not measured: a tile of decode takes 20 instructions more, of 350 at D 128 and 535 at
D 256. One of prompts takes 173 more of 733 at D 128, where that unit is then as busy as the tensor
cores, 800 cycles beside 850; at D 256 for 420 beside 1024 of shared memory. One visit would do for
tanh.approx, which is off by 2⁻¹¹ of C.

*float32.* That is too much near 0, where the beginning of a continued fraction is as precise as a
float32 (`cap_logits`).

Tokens are hidden after it: before, their −∞ would become −C.
"""

from __future__ import annotations

import math

from numba import cuda, float32, int32, uint32

from kernels.cuda.cap_logits import capped
from kernels.cuda.instructions.addresses import anew
from kernels.cuda.instructions.conversions import (
    exp2,
    float32_to_word,
    reciprocal,
    word_to_float32,
)
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.variant import Scalar

ONE, HALF, MINUS_ONE = float32(1), float32(0.5), float32(-1)
TWICE_LOG2_E = float32(2 * math.log2(math.e))


@cuda.jit(device=True, inline="always")
def steeper(unit: Scalar, cap: Scalar) -> Scalar:
    """Return what products are to be multiplied by for z, where `unit` is what they are for x."""
    return unit * (TWICE_LOG2_E * reciprocal(cap))


@cuda.jit(device=True, inline="always")
def steeper_anew(unit: Scalar, cap: Scalar) -> Scalar:
    """Return the same, computed here each time: where no register is left to keep it in."""
    bits = uint32(anew(int32(float32_to_word(cap))))
    return steeper(unit, word_to_float32(bits))


@cuda.jit(device=True, inline="always")
def share_of_cap(product: Scalar, steep: Scalar) -> Scalar:
    """Return the score in units of the cap, of a product of which `steep` makes z."""
    half = exp2(multiply_add(product, steep, MINUS_ONE))
    return ONE - reciprocal(HALF + half)


@cuda.jit(device=True, inline="always")
def exactly_capped(x: Scalar, cap: Scalar) -> Scalar:
    """Return the score x with its cap, as precise as a float32 is."""
    return capped(x, cap, reciprocal(cap))
