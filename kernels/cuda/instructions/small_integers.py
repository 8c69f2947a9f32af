"""Integers of four and eight bits to 16-bit floats, exactly and without a conversion instruction.

A 16-bit float whose exponent makes the last place of its fraction worth 1 is a *magic number*: an
integer put into its low bits is added to it.

    bfloat16   0 10000110 0000000 = 0x4300 = 128     seven bits of fraction: 128 … 255
    float16    0 11001 0000000000 = 0x6400 = 1024    ten bits of fraction:  1024 … 2047

So `bits & 15 | magic` is magic + q, both halves of a word at once and one instruction (LOP3 takes
any function of three words). One fused multiply-add on both halves takes magic and offset off;
every step is exact, since both sides are integers of few bits.

A signed byte has one bit too many for bfloat16's fraction: q = low7 − 128 · sign. The sign bit
falls where the exponent's last bit is, and there it is worth just that:

    0x4300 | 0x80 = 0x4380 = 256 = 128 + 128        (float16: it is bit 7 of the fraction, 128 too)

so q = (magic | q & 127) − (magic | q & 128) in both types.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, Emitter, Intrinsic, Value, instruction


@dataclass(frozen=True, slots=True)
class Magic:
    """The magic number of a 16-bit float: its bits and what it is worth; and the bits of 1 and −1.

    `pair` is PTX's word for two such floats.
    """

    bits: int
    worth: int
    one: int
    minus_one: int
    pair: str

    def negative(self, value: int) -> int:
        """Return the bits of −`value`, a whole number from `worth` to less than twice that."""
        return 0x8000 | self.bits + value - self.worth


MAGIC = {
    "bfloat16": Magic(0x4300, 128, 0x3F80, 0xBF80, "bf16x2"),
    "float16": Magic(0x6400, 1024, 0x3C00, 0xBC00, "f16x2"),
}

# What is taken off a stored 4-bit weight: 8 makes it signed.
NIBBLE_OFFSETS = (0, 8)


def _both(half: int) -> Value:
    return ir.Constant(I32, half * 0x10001)


def _masked(at: Emitter, word: Value, shift: int, mask: int, magic: Magic) -> Value:
    """Write word >> shift & mask | magic, a LOP3: 0xEA is the truth table of a & b | c."""
    shifted = at.builder.lshr(word, ir.Constant(I32, shift)) if shift else word
    operands = [shifted, _both(mask), _both(magic.bits)]
    return at.assembly("lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", I32, operands)


def _multiply_add(at: Emitter, magic: Magic, a: Value, b: Value, c: Value) -> Value:
    return at.assembly(f"fma.rn.{magic.pair} $0, $1, $2, $3;", "=r,r,r,r", I32, [a, b, c])


def _nibbles(magic: Magic, offset: int) -> Intrinsic:
    taken_off = magic.negative(magic.worth + offset)

    def emit(at: Emitter) -> Value:
        for j, register in enumerate(at.row(0, 1, 4)):
            raised = _masked(at, at.arguments[2], 4 * j, 0xF, magic)
            value = _multiply_add(at, magic, raised, _both(magic.one), _both(taken_off))
            at.builder.store(value, register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32], emit)


def _bytes(magic: Magic) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        for j, register in enumerate(at.row(0, 1, 4)):
            word, shift = at.arguments[2 + j // 2], 8 * (j % 2)
            low = _masked(at, word, shift, 0x7F, magic)
            sign = _masked(at, word, shift, 0x80, magic)
            value = _multiply_add(at, magic, sign, _both(magic.minus_one), low)
            at.builder.store(value, register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32, types.uint32], emit)


# widen_nibbles(pairs, i, word): pairs[i, j] = the 4-bit integers of `word` at its bits 4·j and
# 4·j + 16, less the offset, as 16-bit floats; the first in the lower half. By dtype and offset.
WIDEN_NIBBLES: dict[tuple[str, int], Intrinsic] = {
    (dtype, offset): _nibbles(magic, offset)
    for dtype, magic in MAGIC.items()
    for offset in NIBBLE_OFFSETS
}

# widen_bytes(pairs, i, first, second): pairs[i, 0] = the signed bytes 0 and 2 of `first`,
# pairs[i, 1] its bytes 1 and 3, pairs[i, 2 … 3] those of `second`. By dtype.
WIDEN_BYTES: dict[str, Intrinsic] = {dtype: _bytes(magic) for dtype, magic in MAGIC.items()}
