"""Floats of four and eight bits to 16-bit floats, exactly, and scales of theirs to float32.

Four bits. Where the bits stand, and why, is drawn in `kernels.cuda.four_bit_floats`. A pair is a
rotation and a mask of the word, the last one two masks and a multiplication; what stands there is
the number times 2⁻¹²⁶, and one fused multiply-add makes it the number: twelve instructions a word
of eight, where four-bit integers take eleven (`small_integers`). It has to be done at once: sums of
products with numbers that small would be as small, and lose what float32 has not.

float16 has its exponent three bits further up. Seven times what stands below the sign, added, moves
it there, and the number is itself times 2⁻¹⁴: two instructions more a pair.

Their scale is a byte, the exponent of a float32: 2^(byte − 127). 0 would be subnormal and is taken
for zero: it stands for weights below 2⁻¹²⁴.

Eight bits. Three instructions on words that stand as those of Q8_0 put the bits of two floats where
16-bit floats have theirs (`placed_bytes`). In float16 what stands there is the number times 2⁻⁸,
subnormal where the float8 is below 2⁻⁶, and so it stays: whoever scales a sum multiplies by
`RAISED_SCALE` too. In bfloat16 it is the number times 2⁻¹²⁰, too small for sums, so a fused
multiply-add makes it the number, exactly: eight instructions for four weights, where float16 takes
six and bytes that are integers seven.
"""

from __future__ import annotations

from llvmlite import ir
from numba import float32
from numba.cuda import types

from kernels.cuda.four_bit_floats import (
    LAST_FACTOR,
    LAST_PAIR,
    MAGNITUDES,
    ROTATIONS,
    WIDENED,
)
from kernels.cuda.instructions.emit import F32, I32, Emitter, Intrinsic, Value, instruction
from kernels.cuda.instructions.placed_bytes import PLACINGS, placed_words

UNITS = {"bfloat16": ("bf16x2", 0x7E807E80), "float16": ("f16x2", 0x74007400)}
"""PTX's word for two floats of a dtype, and in both halves what takes the unit off: 2¹²⁶, 2¹⁴."""
MINUS_ZEROS = 0x80008000
UP_BY_THREE = 7
BYTE_UNIT = 0x7B80_7B80
"""In both halves of a word what takes the unit off a float8 that is placed in a bfloat16: 2¹²⁰."""

# What the scale of floats of eight bits is multiplied by: by dtype of the floats that they become.
RAISED_SCALE = {
    "bfloat16": float32(1),
    "float16": float32(1 / PLACINGS["float8", "float16"].unit),
}


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


def _widen_bytes(dtype: str) -> Intrinsic:
    pair_type, _ = UNITS[dtype]

    def emit(at: Emitter) -> Value:
        pairs = placed_words(at, PLACINGS["float8", dtype], at.arguments[2:4])
        for pair, register in zip(pairs, at.row(0, 1, 4), strict=True):
            if dtype == "bfloat16":
                operands = [pair, _constant(BYTE_UNIT), _constant(MINUS_ZEROS)]
                assembly = f"fma.rn.{pair_type} $0, $1, $2, $3;"
                pair = at.assembly(assembly, "=r,r,r,r", I32, operands)
            at.builder.store(pair, register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32, types.uint32], emit)


def _scale_of_exponent(at: Emitter) -> Value:
    return at.builder.bitcast(at.builder.shl(at.arguments[0], _constant(23)), F32)


# widen_floats(pairs, i, word): pairs[i, j] = the four-bit floats of pair j of `word` as 16-bit
# floats, the first in the lower half. By dtype.
WIDEN_FLOATS: dict[str, Intrinsic] = {dtype: _widen(dtype) for dtype in UNITS}

# widen_float_bytes(pairs, i, first, second): pairs[i, 0] = the eight-bit floats in bytes 0 and 2 of
# `first` as 16-bit floats, pairs[i, 1] in its bytes 1 and 3, pairs[i, 2 … 3] in those of `second`;
# but for what `RAISED_SCALE` says. A NaN gives ± 480. By dtype.
WIDEN_FLOAT_BYTES: dict[str, Intrinsic] = {dtype: _widen_bytes(dtype) for dtype in UNITS}

# scale_of_exponent(byte): 2^(byte − 127) as a float32, of 0 zero and of 255 infinity; the byte is a
# uint32.
scale_of_exponent = instruction(types.float32, [types.uint32], _scale_of_exponent)
