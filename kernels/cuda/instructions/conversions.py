"""16-bit floats to and from float32, one at a time or two in a word; powers of two, reciprocals.

The 16-bit types travel as bits in a uint16, or as two of them in a uint32, the first in the lower
half:

    bfloat16   s eeeeeeee fffffff           the upper half of a float32
    float16    s eeeee ffffffffff
    float32    s eeeeeeee fffffffffffffffffffffff
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba import float32, uint16, uint32

from kernels.cuda.instructions.emit import (
    F16,
    F32,
    I16,
    I32,
    Emitter,
    Intrinsic,
    Value,
    instruction,
)

FULL_WARP = 0xFFFFFFFF  # mask of the 32 lanes that take part in a warp instruction


def _float_unit(operation: str) -> Intrinsic:
    """Make an intrinsic of one float32 from a PTX operation on the special-function unit."""

    def emit(at: Emitter) -> Value:
        return at.assembly(f"{operation} $0, $1;", "=f,f", F32, at.arguments)

    return instruction(float32, [float32], emit)


# exp2(x) = 2ˣ by the special-function unit, to two units in the last place; 2^-∞ = 0. Softmax uses
# it on scores multiplied by log2(e) beforehand: eˢ = 2^(s·log2 e).
exp2 = _float_unit("ex2.approx.ftz.f32")

# reciprocal(x) = 1 / x, to one unit in the last place; 0 gives ∞.
reciprocal = _float_unit("rcp.approx.ftz.f32")

# reciprocal_root(x) = 1 / √x, to two units in the last place.
reciprocal_root = _float_unit("rsqrt.approx.ftz.f32")


def _maximum(at: Emitter) -> Value:
    return at.assembly("max.f32 $0, $1, $2;", "=f,f,f", F32, at.arguments)


# maximum(a, b) in one instruction; the other one where one is NaN.
maximum = instruction(float32, [float32, float32], _maximum)


# --- one 16-bit float -----------------------------------------------------------------------------


def _bfloat16_to_float32(at: Emitter) -> Value:
    upper_half = at.builder.shl(at.builder.zext(at.arguments[0], I32), ir.Constant(I32, 16))
    return at.builder.bitcast(upper_half, F32)


def _float32_to_bfloat16(at: Emitter) -> Value:
    return at.assembly("cvt.rn.bf16.f32 $0, $1;", "=h,f", I16, at.arguments)


def _float16_to_float32(at: Emitter) -> Value:
    return at.builder.fpext(at.builder.bitcast(at.arguments[0], F16), F32)


def _float32_to_float16(at: Emitter) -> Value:
    return at.builder.bitcast(at.builder.fptrunc(at.arguments[0], F16), I16)


# bfloat16_to_float32(bits) is exact: a shift.
bfloat16_to_float32 = instruction(float32, [uint16], _bfloat16_to_float32)

# float32_to_bfloat16(x) rounds ties to even; one instruction, from compute capability 8.0 on.
float32_to_bfloat16 = instruction(uint16, [float32], _float32_to_bfloat16)

# float16_to_float32(bits) is exact.
float16_to_float32 = instruction(float32, [uint16], _float16_to_float32)

# float32_to_float16(x) rounds ties to even; what is too large becomes infinity.
float32_to_float16 = instruction(uint16, [float32], _float32_to_float16)

# dtype of a tensor → (stored element to float32, float32 to stored element).
CONVERSIONS: dict[str, tuple[Intrinsic, Intrinsic]] = {
    "float32": (float32, float32),
    "float16": (float16_to_float32, float32_to_float16),
    "bfloat16": (bfloat16_to_float32, float32_to_bfloat16),
}


# --- two of them in a word ------------------------------------------------------------------------


def widen_halves(at: Emitter, dtype: str, word: Value) -> list[Value]:
    """Write the two 16-bit floats of a word as float32, the lower half first."""
    if dtype == "bfloat16":
        low = at.builder.shl(word, ir.Constant(I32, 16))
        high = at.builder.and_(word, ir.Constant(I32, 0xFFFF0000))
        return [at.builder.bitcast(half, F32) for half in (low, high)]
    high = at.builder.lshr(word, ir.Constant(I32, 16))
    halves = [at.builder.trunc(half, I16) for half in (word, high)]
    return [at.builder.fpext(at.builder.bitcast(half, F16), F32) for half in halves]


def round_halves(at: Emitter, dtype: str, low: Value, high: Value) -> Value:
    """Write two float32 as a word of 16-bit floats, rounded to nearest, ties to even."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    # PTX names the upper half first.
    return at.assembly(f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", I32, [low, high])


@dataclass(frozen=True, slots=True)
class PairConversions:
    """The conversions of two 16-bit floats in a word: `pack(low, high)`, `low(word)`, `high(word)`.

    `pack` rounds ties to even; the others are exact.
    """

    pack: Intrinsic
    low: Intrinsic
    high: Intrinsic


def _pair_conversions(dtype: str) -> PairConversions:
    def half(index: int) -> Intrinsic:
        return instruction(
            float32, [uint32], lambda at: widen_halves(at, dtype, at.arguments[0])[index]
        )

    pack = instruction(
        uint32, [float32, float32], lambda at: round_halves(at, dtype, *at.arguments)
    )
    return PairConversions(pack, half(0), half(1))


# dtype of a word's halves → their conversions.
PAIR_CONVERSIONS: dict[str, PairConversions] = {
    dtype: _pair_conversions(dtype) for dtype in ("float16", "bfloat16")
}

# The bits of a word as a float32, and back.
word_to_float32 = instruction(
    float32, [uint32], lambda at: at.builder.bitcast(at.arguments[0], F32)
)
float32_to_word = instruction(
    uint32, [float32], lambda at: at.builder.bitcast(at.arguments[0], I32)
)
