"""Integers of four to eight bits to 16-bit floats, exactly and without a conversion instruction.

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

float16 has bits enough to leave a nibble where it is, at bits 4 … 7: there it is worth 16 · q, and
the multiply-add, which multiplies anyway, takes a sixteenth of it. So only every other nibble of a
half has to be shifted to its place. bfloat16's fraction has seven bits: all but the first have.

Five and six bits lie three and two to a half, and the last ones in parts (`k_quant_layout`). Those
are put together under the same magic number by one more LOP3. Of five bits float16 leaves the
second where it is, too, for a thirty-second of it.

What is taken off may be a zero point of its own for each row, made ready once as a word of two
equal halves. For nibbles these are −(magic + z), which costs the weights nothing: the multiply-add
takes off a register in the place of a constant. For bytes, whose two magic numbers cancel, they are
−z, one multiply-add more. Differences of two bytes, −255 … 255, are exact in bfloat16 too.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, Emitter, Intrinsic, Value, instruction


@dataclass(frozen=True, slots=True)
class Magic:
    """The magic number of a 16-bit float: its bits and what it is worth; and the bits of 1 and −1.

    `pair` is PTX's word for two such floats. `fraction_bits`: 7 or 10.
    """

    bits: int
    worth: int
    one: int
    minus_one: int
    pair: str
    fraction_bits: int

    def negative(self, value: int) -> int:
        """Return the bits of −`value`, a whole number from `worth` to less than twice that."""
        return 0x8000 | self.bits + value - self.worth


MAGIC = {
    "bfloat16": Magic(0x4300, 128, 0x3F80, 0xBF80, "bf16x2", 7),
    "float16": Magic(0x6400, 1024, 0x3C00, 0xBC00, "f16x2", 10),
}

# Of float16: a sixteenth; and 15/16 of the magic number, which −(magic + z) and −(magic/16 + z) are
# apart. And a thirty-second.
SIXTEENTH = 0x2C00
FIFTEEN_SIXTEENTHS = 0x6380
THIRTY_SECOND = 0x2800

# What is taken off a stored 4-bit weight: 8 makes it signed.
NIBBLE_OFFSETS = (0, 8)

# Of weights of five and six bits.
WIDE_OFFSETS = {5: (0, 16), 6: (32,)}


def _both(half: int) -> Value:
    return ir.Constant(I32, half * 0x10001)


def _masked(at: Emitter, word: Value, shift: int, mask: int, magic: Magic) -> Value:
    """Write word >> shift & mask | magic, a LOP3: 0xEA is the truth table of a & b | c."""
    shifted = at.builder.lshr(word, ir.Constant(I32, shift)) if shift else word
    operands = [shifted, _both(mask), _both(magic.bits)]
    return at.assembly("lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", I32, operands)


def _multiply_add(at: Emitter, magic: Magic, a: Value, b: Value, c: Value) -> Value:
    return at.assembly(f"fma.rn.{magic.pair} $0, $1, $2, $3;", "=r,r,r,r", I32, [a, b, c])


def _write_nibbles(at: Emitter, magic: Magic, word: Value, taken_off: Value) -> Value:
    """Write pairs[i, j] = the nibbles at 4·j and 4·j + 16 and `taken_off`, halves −(magic + z)."""
    one = _both(magic.one)
    if magic.fraction_bits < 8:
        for j, register in enumerate(at.row(0, 1, 4)):
            raised = _masked(at, word, 4 * j, 0xF, magic)
            at.builder.store(_multiply_add(at, magic, raised, one, taken_off), register)
        return at.nothing()
    sixteenth = _both(SIXTEENTH)
    taken_off_sixteenth = _multiply_add(at, magic, taken_off, one, _both(FIFTEEN_SIXTEENTHS))
    for j, register in enumerate(at.row(0, 1, 4)):
        if j % 2 == 0:
            raised = _masked(at, word, 4 * j, 0xF, magic)
            value = _multiply_add(at, magic, raised, one, taken_off)
        else:
            raised = _masked(at, word, 4 * (j - 1), 0xF0, magic)
            value = _multiply_add(at, magic, raised, sixteenth, taken_off_sixteenth)
        at.builder.store(value, register)
    return at.nothing()


def _joined(at: Emitter, word: Value, shift: int, mask: int, raised: Value) -> Value:
    """Write word >> shift & mask | raised."""
    shifted = at.builder.lshr(word, ir.Constant(I32, shift)) if shift else word
    operands = [shifted, _both(mask), raised]
    return at.assembly("lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", I32, operands)


def _raised_fives(at: Emitter, magic: Magic, own: Value, rest: Value) -> list[Value]:
    first = 0 if magic.fraction_bits > 9 else 5  # the second stays where it is, or does not
    return [
        _masked(at, own, 0, 0x1F, magic),
        _masked(at, own, first, 0x1F << 5 - first, magic),
        _masked(at, own, 10, 0x1F, magic),
        _joined(at, rest, 0, 0xF, _masked(at, own, 11, 0x10, magic)),
    ]


def _raised_sixes(at: Emitter, magic: Magic, own: Value, rest: Value) -> list[Value]:
    return [
        _masked(at, own, 0, 0x3F, magic),
        _masked(at, own, 6, 0x3F, magic),
        _masked(at, rest, 0, 0x3F, magic),
        _joined(at, rest, 2, 0x30, _masked(at, own, 12, 0xF, magic)),
    ]


def _wide(magic: Magic, bits: int, offset: int) -> Intrinsic:
    taken_off, one = _both(magic.negative(magic.worth + offset)), _both(magic.one)

    def emit(at: Emitter) -> Value:
        raise_all = _raised_fives if bits == 5 else _raised_sixes
        raised = raise_all(at, magic, at.arguments[2], at.arguments[3])
        for j, register in enumerate(at.row(0, 1, 4)):
            factor, less = one, taken_off
            if bits == 5 and j == 1 and magic.fraction_bits > 9:
                factor, less = _both(THIRTY_SECOND), _both(_small_negative(32 + offset))
            at.builder.store(_multiply_add(at, magic, raised[j], factor, less), register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32, types.uint32], emit)


def _small_negative(value: int) -> int:
    """Return the bits of −`value` in float16, a whole number from 32 to 63."""
    return 0x8000 | 0x5000 | (value - 32) << 5


def _nibbles(magic: Magic, offset: int) -> Intrinsic:
    taken_off = magic.negative(magic.worth + offset)

    def emit(at: Emitter) -> Value:
        return _write_nibbles(at, magic, at.arguments[2], _both(taken_off))

    return instruction(types.void, [None, None, types.uint32], emit)


def _nibbles_less(magic: Magic) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        return _write_nibbles(at, magic, at.arguments[2], at.arguments[3])

    return instruction(types.void, [None, None, types.uint32, types.uint32], emit)


def _in_both_halves(at: Emitter, word: Value, byte: int) -> Value:
    """Write a byte of a word to the low bytes of both halves, zeros above them."""
    selector = ir.Constant(I32, byte * 0x101 | 0x4040)
    operands = [word, ir.Constant(I32, 0), selector]
    return at.assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", I32, operands)


def _zero_nibbles(magic: Magic) -> Intrinsic:
    negative = ir.Constant(I32, magic.negative(magic.worth) * 0x10001)

    def emit(at: Emitter) -> Value:
        for j, register in enumerate(at.row(0, 1, 4)):
            spread = _in_both_halves(at, at.arguments[2], j // 2)
            if j % 2:
                spread = at.builder.lshr(spread, ir.Constant(I32, 4))
            operands = [spread, _both(0xF), negative]
            value = at.assembly("lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", I32, operands)
            at.builder.store(value, register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32], emit)


def _zero_bytes(magic: Magic) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        for j, register in enumerate(at.row(0, 1, 4)):
            spread = _in_both_halves(at, at.arguments[2], j)
            low = _masked(at, spread, 0, 0x7F, magic)
            sign = _masked(at, spread, 0, 0x80, magic)
            at.builder.store(_multiply_add(at, magic, low, _both(magic.minus_one), sign), register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32], emit)


def _bytes(magic: Magic, *, is_less: bool) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        for j, register in enumerate(at.row(0, 1, 4)):
            word, shift = at.arguments[2 + j // 2], 8 * (j % 2)
            low = _masked(at, word, shift, 0x7F, magic)
            sign = _masked(at, word, shift, 0x80, magic)
            value = _multiply_add(at, magic, sign, _both(magic.minus_one), low)
            if is_less:
                value = _multiply_add(at, magic, value, _both(magic.one), at.arguments[4])
            at.builder.store(value, register)
        return at.nothing()

    words = [types.uint32] * (3 if is_less else 2)
    return instruction(types.void, [None, None, *words], emit)


# widen_nibbles(pairs, i, word): pairs[i, j] = the 4-bit integers of `word` at its bits 4·j and
# 4·j + 16, less the offset, as 16-bit floats; the first in the lower half. By dtype and offset.
WIDEN_NIBBLES: dict[tuple[str, int], Intrinsic] = {
    (dtype, offset): _nibbles(magic, offset)
    for dtype, magic in MAGIC.items()
    for offset in NIBBLE_OFFSETS
}

# widen_bytes(pairs, i, first, second): pairs[i, 0] = the signed bytes 0 and 2 of `first`,
# pairs[i, 1] its bytes 1 and 3, pairs[i, 2 … 3] those of `second`. By dtype.
WIDEN_BYTES: dict[str, Intrinsic] = {
    dtype: _bytes(magic, is_less=False) for dtype, magic in MAGIC.items()
}

# widen_wide(pairs, i, own, rest): pairs[i, j] = the integers of five or six bits of a row's word
# and of the rest, shifted so that the row's part is the lowest, less the offset. By dtype, bits and
# offset.
WIDEN_WIDE: dict[tuple[str, int, int], Intrinsic] = {
    (dtype, bits, offset): _wide(magic, bits, offset)
    for dtype, magic in MAGIC.items()
    for bits, offsets in WIDE_OFFSETS.items()
    for offset in offsets
}

# widen_nibbles_less(pairs, i, word, zero), widen_bytes_less(pairs, i, first, second, zero): the
# same less a zero point, which `zero` is, made ready. By dtype.
WIDEN_NIBBLES_LESS: dict[str, Intrinsic] = {
    dtype: _nibbles_less(magic) for dtype, magic in MAGIC.items()
}
WIDEN_BYTES_LESS: dict[str, Intrinsic] = {
    dtype: _bytes(magic, is_less=True) for dtype, magic in MAGIC.items()
}

# ready_nibbles(zeros, i, word): zeros[i, j] = the 4-bit zero point at bit 4·j of `word`, made ready
# for `widen_nibbles_less`; ready_bytes: the signed byte j, for `widen_bytes_less`. By dtype.
READY_NIBBLES: dict[str, Intrinsic] = {
    dtype: _zero_nibbles(magic) for dtype, magic in MAGIC.items()
}
READY_BYTES: dict[str, Intrinsic] = {dtype: _zero_bytes(magic) for dtype, magic in MAGIC.items()}
