"""Keys and values of eight bits: to 16-bit floats, and from float32.

What the bits mean is said in `kernels.reference.quantized_kv`. int8 is widened by `small_integers`.
A float8, s eeee mmm, has too few bits in exponent and fraction, so they can be put into those of a
16-bit float as they stand, two at a time:

    float8                    s     eeee mmm
    float16      s    eeeee mmmmmmmmmm        s 0eeee mmm0000000     bias 15 for 7: 2⁸ too small
    bfloat16     s eeeeeeee mmmmmmm           s 0000eeee mmm0000     bias 127 for 7: 2¹²⁰ too small

For e = 0 this holds too, for the wider float then is a subnormal one as well. One multiplication of
both halves by that power of two makes it right; it is exact, provided that the machine does not
flush subnormal operands, which PTX promises for `fma` without `.ftz`.

Capability 8.9 has an instruction for this, 8.0 has not; three bitwise ones and a multiplication for
two numbers are few enough, and PTX stays the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import F32, I32, Emitter, Intrinsic, Value, instruction
from kernels.cuda.instructions.small_integers import WIDEN_BYTES

BYTES_AT_ONCE = 8

_PAIR = ir.VectorType(I32, 2)
_SMALLEST_NORMAL = 0x3C80_0000  # 2⁻⁶, the float8's, as float32
_STEPS = 2.0**9  # of subnormal float8 in 1


@dataclass(frozen=True, slots=True)
class Placing:
    """How a float8 is put into a 16-bit float.

    `shift`: of exponent and fraction to the right, from the top of the half but for the sign.
    `power`: bits of the power of two that is missing. `pair`: PTX's word for two such floats.
    """

    shift: int
    power: int
    pair: str

    @property
    def mask(self) -> int:
        """Where exponent and fraction end up."""
        return 0x7F00 >> self.shift


PLACINGS = {
    "bfloat16": Placing(4, 0x7B80, "bf16x2"),
    "float16": Placing(1, 0x5C00, "f16x2"),
}
SIGNS = 0x8000_8000


def _both(half: int) -> Value:
    return ir.Constant(I32, half * 0x10001)


def _float8(placing: Placing) -> Intrinsic:
    def widened(at: Emitter, word: Value) -> Value:
        """Widen the upper byte of each half."""
        builder = at.builder
        size = builder.and_(
            builder.lshr(word, ir.Constant(I32, placing.shift)), _both(placing.mask)
        )
        raised = builder.or_(builder.and_(word, ir.Constant(I32, SIGNS)), size)
        operands = [raised, _both(placing.power), _both(0x8000)]  # − 0 changes no zero's sign
        return at.assembly(f"fma.rn.{placing.pair} $0, $1, $2, $3;", "=r,r,r,r", I32, operands)

    def emit(at: Emitter) -> Value:
        for j, register in enumerate(at.row(0, 1, 4)):
            word = at.arguments[2 + j // 2]
            if j % 2 == 0:
                word = at.builder.shl(word, ir.Constant(I32, 8))
            at.builder.store(widened(at, word), register)
        return at.nothing()

    return instruction(types.void, [None, None, types.uint32, types.uint32], emit)


# widen_float8(pairs, i, first, second): as `small_integers.WIDEN_BYTES`: pairs[i, 0] = the bytes 0
# and 2 of `first`, pairs[i, 1] its bytes 1 and 3, pairs[i, 2 … 3] those of `second`. By dtype.
WIDEN_FLOAT8: dict[str, Intrinsic] = {
    dtype: _float8(placing) for dtype, placing in PLACINGS.items()
}

# The same by dtype of the pool and dtype of the result.
WIDEN: dict[tuple[str, str], Intrinsic] = {
    **{("int8", dtype): widen for dtype, widen in WIDEN_BYTES.items()},
    **{("float8", dtype): widen for dtype, widen in WIDEN_FLOAT8.items()},
}


def _nearest(at: Emitter, value: Value) -> Value:
    return at.assembly("cvt.rni.s32.f32 $0, $1;", "=r,f", I32, [value])


def _int8_code(at: Emitter, value: Value) -> Value:
    return at.builder.and_(_nearest(at, value), ir.Constant(I32, 0xFF))


def _float8_code(at: Emitter, value: Value) -> Value:
    builder = at.builder
    bits = builder.bitcast(value, I32)
    magnitude = builder.and_(bits, ir.Constant(I32, 0x7FFF_FFFF))
    odd = builder.and_(builder.lshr(magnitude, ir.Constant(I32, 20)), ir.Constant(I32, 1))
    rounded = builder.add(builder.add(magnitude, ir.Constant(I32, 0x7_FFFF)), odd)
    normal = builder.sub(builder.lshr(rounded, ir.Constant(I32, 20)), ir.Constant(I32, 120 << 3))
    normal = builder.and_(normal, ir.Constant(I32, 0x7F))
    size = builder.bitcast(magnitude, F32)
    small = _nearest(at, builder.fmul(size, ir.Constant(F32, _STEPS)))
    is_small = builder.icmp_unsigned("<", magnitude, ir.Constant(I32, _SMALLEST_NORMAL))
    sign = builder.and_(builder.lshr(bits, ir.Constant(I32, 24)), ir.Constant(I32, 0x80))
    return builder.or_(builder.select(is_small, small, normal), sign)


_CODES = {"int8": _int8_code, "float8": _float8_code}


def _store(dtype: str) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        values = [at.builder.load(register) for register in at.row(2, 3, BYTES_AT_ONCE)]
        pair = ir.Constant(_PAIR, ir.Undefined)
        for i in range(2):
            word: Value = ir.Constant(I32, 0)
            for j, value in enumerate(values[4 * i : 4 * i + 4]):
                code = at.builder.shl(_CODES[dtype](at, value), ir.Constant(I32, 8 * j))
                word = at.builder.or_(word, code)
            pair = at.builder.insert_element(pair, word, ir.Constant(I32, i))
        address = at.builder.bitcast(at.element(0, 1), _PAIR.as_pointer())
        at.builder.store(pair, address, align=8)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


# store_codes(target, element, values, i): the eight bytes at `target[element]`, a multiple of
# eight, = values[i, 0 … 7], each rounded to the nearest code, ties to even. A number beyond the
# largest code is not allowed; NaN gives some code.
STORE_CODES: dict[str, Intrinsic] = {dtype: _store(dtype) for dtype in _CODES}
