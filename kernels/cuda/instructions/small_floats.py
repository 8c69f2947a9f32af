"""Floats of four bits to 16-bit floats, exactly, and their scales to float32.

Where the bits stand, and why, is drawn in `kernels.cuda.four_bit_floats`. A pair is a rotation and
a mask of the word, the last one two masks and a multiplication; what stands there is the number
times 2⁻¹²⁶, and one fused multiply-add makes it the number: twelve instructions a word of eight,
where four-bit integers take eleven (`small_integers`). It has to be done at once: sums of products
with numbers that small would be as small, and lose what float32 has not.

float16 has its exponent three bits further up. Seven times what stands below the sign, added, moves
it there, and the number is itself times 2⁻¹⁴: two instructions more a pair.

A scale is a byte, the exponent of a float32: 2^(byte − 127). 0 would be subnormal and is taken for
zero: it stands for weights below 2⁻¹²⁴.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.four_bit_floats import (
    LAST_FACTOR,
    LAST_PAIR,
    MAGNITUDES,
    ROTATIONS,
    WIDENED,
)
from kernels.cuda.instructions.emit import F32, I32, Emitter, Intrinsic, Value, instruction

UNITS = {"bfloat16": ("bf16x2", 0x7E807E80), "float16": ("f16x2", 0x74007400)}
"""PTX's word for two floats of a dtype, and in both halves what takes the unit off: 2¹²⁶, 2¹⁴."""
MINUS_ZEROS = 0x80008000
UP_BY_THREE = 7


def _constant(value: int) -> Value:
    return ir.Constant(I32, value)


def _pairs(at: Emitter, word: Value) -> list[Value]:
    """Write the four pairs with their bits where bfloat16 has them."""
    widened = _constant(WIDENED)
    pairs = []
    for left in ROTATIONS:
        rotated = word
        if left:
            assembly, operands = "shf.r.wrap.b32 $0, $1, $1, $2;", [word, _constant(left)]
            rotated = at.assembly(assembly, "=r,r,r", I32, operands)
        pairs.append(at.builder.and_(rotated, widened))
    last = at.builder.mul(at.builder.and_(word, _constant(LAST_PAIR)), _constant(LAST_FACTOR))
    return [*pairs, at.builder.and_(last, widened)]


def _widen(dtype: str) -> Intrinsic:
    pair_type, unit = UNITS[dtype]

    def emit(at: Emitter) -> Value:
        registers = at.row(0, 1, 4)
        for pair, register in zip(_pairs(at, at.arguments[2]), registers, strict=True):
            if dtype == "float16":
                magnitude = at.builder.and_(pair, _constant(MAGNITUDES))
                pair = at.builder.add(pair, at.builder.mul(magnitude, _constant(UP_BY_THREE)))
            operands = [pair, _constant(unit), _constant(MINUS_ZEROS)]
            assembly = f"fma.rn.{pair_type} $0, $1, $2, $3;"
            at.builder.store(at.assembly(assembly, "=r,r,r,r", I32, operands), register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32], emit)


def _scale_of_exponent(at: Emitter) -> Value:
    return at.builder.bitcast(at.builder.shl(at.arguments[0], _constant(23)), F32)


# widen_floats(pairs, i, word): pairs[i, j] = the four-bit floats of pair j of `word` as 16-bit
# floats, the first in the lower half. By dtype.
WIDEN_FLOATS: dict[str, Intrinsic] = {dtype: _widen(dtype) for dtype in UNITS}

# scale_of_exponent(byte): 2^(byte − 127) as a float32, of 0 zero and of 255 infinity; the byte is a
# uint32.
scale_of_exponent = instruction(types.float32, [types.uint32], _scale_of_exponent)
