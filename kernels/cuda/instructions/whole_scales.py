"""Scales that are bytes, times what they share, to float32: exactly, in two instructions.

A float32 of 32768 and more has 8 bits of fraction below 1, and above them the integers up to 255:

    0x4700bb00 = 32768 + bb          a byte put in its place (PRMT) is added to a magic number

and then d · s = (32768 + s) · d − 32768 · d is one fused multiply-add. It is exact, since d · s is
a float32: d has 11 bits and s has 8. 32768 · d is made once for all s that share d. Of signed
scales, stored as s + 128, it is 32896 · d, of 11 and 9 bits, exact too.
"""

from __future__ import annotations

from llvmlite import ir
from numba import float32, int32, uint32

from kernels.cuda.instructions.emit import F32, I32, Emitter, Value, instruction

RAISED_BY = 32768
_RAISED_BITS = 0x47000000


def _raised_byte(at: Emitter) -> Value:
    word, index = at.arguments
    # From the lowest: a zero, the byte, and the upper half of the magic number.
    selector = at.builder.add(at.builder.shl(index, ir.Constant(I32, 4)), ir.Constant(I32, 0x7604))
    operands = [word, ir.Constant(I32, _RAISED_BITS), selector]
    bits = at.assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", I32, operands)
    return at.builder.bitcast(bits, F32)


# raised_byte(word, i): RAISED_BY plus byte i of a word, as a float32.
raised_byte = instruction(float32, [uint32, int32], _raised_byte)
