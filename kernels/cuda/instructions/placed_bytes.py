"""Keys and values of eight bits as 16-bit floats without arithmetic: only their bits are moved.

Tensor cores multiply whatever a 16-bit float can say, and a power of two or a constant that is the
same for all elements can be taken off their sums, which are few. So a byte need not become its
number; it is enough that it becomes (number + offset) · unit:

    int8     the byte, its sign bit turned over, in the low byte of the half: a whole number of the
             float's smallest steps, subnormal or just above; offset 128

                 bfloat16   s eeeeeeee fffffff        unit 2⁻¹³³, the step below 2⁻¹²⁵
                                     u uuuuuuu
                 float16    s eeeee ffffffffff        unit 2⁻²⁴, the step below 2⁻¹³
                                      uuuuuuuu

    float8   s eeee mmm, sign apart, exponent and fraction at the float's; offset 0

                 bfloat16   s 0000eeee mmm0000        unit 2⁻¹²⁰: its bias is 127, the byte's is 7
                 float16    s 0eeee mmm0000000        unit 2⁻⁸:   its bias is 15

A subnormal byte becomes a subnormal float, which is right again. All this is exact as long as the
tensor cores take subnormal numbers as they are. NVIDIA's manual is silent; who measured found them
kept (Fasi, Higham, Mikaitis and Pranesh 2021); if they were not, no comparison of `make gpu` with
int8 would pass. In bfloat16 the other operand is raised by `RAISED`, so that products are numbers
of ordinary size.

A word of two halves costs two machine instructions for int8 and three for float8, one of which
takes the bytes of two words apart, as values need it, or one less for int8 at even bytes.
`eight_bits.WIDEN` takes four to five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from llvmlite import ir
from numba import uint32
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, Emitter, Intrinsic, Value, instruction

RAISED: Final = {"bfloat16": 2.0**80, "float16": 1.0}
"""What to multiply the other operand by, of up to 2⁴⁷, by the floats' dtype."""

FIRST_COLUMN: Final = 0xC480
NEXT_COLUMN: Final = 0x1111
"""A selector is FIRST_COLUMN + i · NEXT_COLUMN: byte i of two words, each below its own sign."""


@dataclass(frozen=True, slots=True)
class Placing:
    """How a byte stands in a half: as (number + `offset`) · `unit`.

    A half with the byte below and anything above is shifted left by `shift`, masked with `mask`;
    then the bits of `turned` are turned over.
    """

    unit: float
    offset: int
    shift: int
    mask: int
    turned: int


PLACINGS: Final = {
    ("int8", "bfloat16"): Placing(2.0**-133, 128, 0, 0x00FF, 0x80),
    ("int8", "float16"): Placing(2.0**-24, 128, 0, 0x00FF, 0x80),
    # The byte has its sign above it: the top bits of the shifted half are all the sign.
    ("float8", "bfloat16"): Placing(2.0**-120, 0, 4, 0x87F0, 0),
    ("float8", "float16"): Placing(2.0**-8, 0, 7, 0xBF80, 0),
}
"""By dtype of the pool and of the floats."""

MINUS_OFFSET: Final = uint32(0x8080_8080)
"""Two halves of −128 units, for either dtype."""


def _both(half: int) -> Value:
    return ir.Constant(I32, half * 0x10001)


def _chosen(at: Emitter, a: Value, b: Value, selector: Value) -> Value:
    return at.assembly("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", I32, [a, b, selector])


def _placed(at: Emitter, placing: Placing, word: Value) -> Value:
    if placing.shift:
        word = at.builder.shl(word, ir.Constant(I32, placing.shift))
    if not placing.turned:
        return at.builder.and_(word, _both(placing.mask))
    # One LOP3, which the compiler does not see here: 0x6A is the truth table of a & b ^ c.
    operands = [word, _both(placing.mask), _both(placing.turned)]
    return at.assembly("lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", I32, operands)


def _columns(placing: Placing) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        return _placed(at, placing, _chosen(at, *at.arguments))

    return instruction(types.uint32, [types.uint32] * 3, emit)


def placed_words(at: Emitter, placing: Placing, words: Sequence[Value]) -> list[Value]:
    """Write the bytes 0 and 2 of the first word, its bytes 1 and 3, and those of the second."""
    pairs = []
    for j in range(4):
        word, odd = words[j // 2], j % 2
        if placing.shift:  # needs the signs
            selector = ir.Constant(I32, 0xA280 + odd * NEXT_COLUMN)
            word = _chosen(at, word, word, selector)
        elif odd:
            word = at.builder.lshr(word, ir.Constant(I32, 8))
        pairs.append(_placed(at, placing, word))
    return pairs


def _words(placing: Placing) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        pairs = placed_words(at, placing, at.arguments[2:4])
        for pair, register in zip(pairs, at.row(0, 1, 4), strict=True):
            at.builder.store(pair, register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32, types.uint32], emit)


# place_words(pairs, i, first, second): pairs[i, 0] = the bytes 0 and 2 of `first`, pairs[i, 1] its
# bytes 1 and 3, pairs[i, 2 … 3] those of `second`. By dtype of the pool and of the floats.
PLACE_WORDS: dict[tuple[str, str], Intrinsic] = {
    dtypes: _words(placing) for dtypes, placing in PLACINGS.items()
}

# place_column(a, b, selector): the byte that `selector` says of `a`, and that of `b`.
PLACE_COLUMN: dict[tuple[str, str], Intrinsic] = {
    dtypes: _columns(placing) for dtypes, placing in PLACINGS.items()
}
