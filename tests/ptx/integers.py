"""What instructions on integers and bits compute, lane by lane.

Source: PTX ISA 9.0, chapters 9.7.1 (integer arithmetic), 9.7.8 (logic and shift), 9.7.6
(comparison and selection), 9.7.9 (data movement and conversion).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # of NumPy
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Form:
    """An instruction whose result in a lane depends on its operands in that lane only.

    `result` and `operands` are types; `function` takes and gives arrays.
    """

    result: str
    operands: tuple[str, ...]
    function: Function


SIGNED = ("s16", "s32", "s64")
UNSIGNED = ("u16", "u32", "u64")
BITS = ("b16", "b32", "b64")


def _bits(x: Array) -> int:
    return 8 * int(x.itemsize)


def _divide(a: Array, b: Array) -> Array:
    """Towards zero. By zero (refused where a lane takes part): anything."""
    divisor = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient += (quotient * divisor != a) & ((a < 0) != (divisor < 0))
    return quotient


def _remainder(a: Array, b: Array) -> Array:
    return a - _divide(a, b) * b


def _wide(a: Array, b: Array) -> Array:
    double = f"{a.dtype.kind}{2 * a.itemsize}"
    return a.astype(double) * b.astype(double)


def _high(a: Array, b: Array) -> Array:
    """The upper half of the double-width product."""
    if a.itemsize < 8:
        return (_wide(a, b) >> np.array(_bits(a), f"{a.dtype.kind}{2 * a.itemsize}")).astype(
            a.dtype
        )
    x, y = a.view(np.uint64), b.view(np.uint64)
    mask, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & mask)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def _shift_left(a: Array, amount: Array) -> Array:
    wide = amount.astype(a.dtype)
    return np.where(amount < _bits(a), a << np.minimum(wide, _bits(a) - 1), a.dtype.type(0))


def _shift_right(a: Array, amount: Array) -> Array:
    """More than all bits: zero, or all the sign."""
    limited = np.minimum(amount, _bits(a) - 1).astype(a.dtype)
    shifted = a >> limited
    return shifted if a.dtype.kind == "i" else np.where(amount < _bits(a), shifted, a.dtype.type(0))


def _insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: the lowest `length` bits of a, put into b at `position`."""
    position, length = position & 0xFF, length & 0xFF
    ones = np.full_like(a, -1 & (1 << _bits(a)) - 1)
    mask = _shift_left(~_shift_left(ones, length), position)
    return (b & ~mask) | (_shift_left(a, position) & mask)


def _extract(a: Array, position: Array, length: Array) -> Array:
    """bfe: `length` bits from `position`, extended by zeros or by their highest bit."""
    position, length = position & 0xFF, length & 0xFF
    width = _bits(a)
    unsigned = a.view(f"u{a.itemsize}")
    kept = np.minimum(length, width)
    ones = np.full_like(unsigned, (1 << width) - 1)
    mask = ~_shift_left(ones, kept)
    field = _shift_right(unsigned, position) & mask
    if a.dtype.kind == "i":
        top = np.minimum(position.astype(np.int64) + length - 1, width - 1)
        sign = _shift_right(unsigned, np.maximum(top, 0).astype(np.uint32)) & 1
        field = np.where((sign == 1) & (length > 0), field | ~mask, field)
    return field.view(a.dtype)


def _leading_zeros(a: Array) -> Array:
    count = np.zeros(a.shape, np.uint32)
    width = _bits(a)
    value, step = a, width // 2
    while step:
        upper = value >> a.dtype.type(width - step) == 0
        count += np.where(upper, np.uint32(step), np.uint32(0))
        value = np.where(upper, value << a.dtype.type(step), value)
        step //= 2
    return np.where(a == 0, np.uint32(width), count)


def _count_ones(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: byte i is number (selector >> 4i) & 7 of a0 … a3 b0 … b3; with bit 3, its sign."""
    source = np.stack([a, b], axis=-1).view(np.uint8)
    nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    chosen = np.take_along_axis(source, (nibbles & 7).astype(np.intp), axis=1)
    signs = np.where(chosen & 0x80, np.uint8(0xFF), np.uint8(0))
    chosen = np.where(nibbles & 8, signs, chosen)
    return np.ascontiguousarray(chosen).view(np.uint32)[:, 0]


def _funnel_right(a: Array, b: Array, amount: Array) -> Array:
    """shf.r.wrap: the lower word of b:a shifted to the right by the amount's last five bits."""
    wide = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
    return (wide >> (amount & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


def lop3(table: int) -> Function:
    """Return the function of three words: bit 4a + 2b + c of the table is for bits a, b, c."""

    def of_two(entries: int, a: Array, b: Array) -> Array:
        """Bit 2a + b of the entries."""
        result = np.zeros_like(a)
        for index in range(4):
            if entries >> index & 1:
                result |= (a if index & 2 else ~a) & (b if index & 1 else ~b)
        return result

    entries = [sum((table >> 2 * i + bit & 1) << i for i in range(4)) for bit in range(2)]
    return lambda a, b, c: (of_two(entries[1], a, b) & c) | (of_two(entries[0], a, b) & ~c)


def _select(a: Array, b: Array, condition: Array) -> Array:
    return np.where(condition, a, b)


def _convert(kind: str) -> Function:
    # Between integers: to a narrower one the lower bits, to a wider one as the source's type says.
    dtype = np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
    return lambda a: a.astype(dtype)


_OF_TWO: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul.lo": np.multiply, "min": np.minimum,
    "max": np.maximum, "mul.hi": _high, "div": _divide, "rem": _remainder,
}  # fmt: skip
_COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
_OF_UNSIGNED: dict[str, Function] = {
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def integer_forms() -> Iterator[tuple[str, Form]]:
    """Return opcode, form of every instruction on integers, bits and predicates."""
    for t in SIGNED + UNSIGNED:
        yield from _arithmetic(t)
        yield from _conversions(t)
    for t in SIGNED:
        yield f"neg.{t}", Form(t, (t,), np.negative)
        yield f"abs.{t}", Form(t, (t,), np.abs)
    for t in (*BITS, "pred"):
        yield f"and.{t}", Form(t, (t, t), np.bitwise_and)
        yield f"or.{t}", Form(t, (t, t), np.bitwise_or)
        yield f"xor.{t}", Form(t, (t, t), np.bitwise_xor)
        yield f"not.{t}", Form(t, (t,), np.invert)
    for t in BITS:
        yield f"shl.{t}", Form(t, (t, "u32"), _shift_left)
    for t in ("b32", "b64"):
        yield f"popc.{t}", Form("u32", (t,), _count_ones)
        yield f"clz.{t}", Form("u32", (t,), _leading_zeros)
        yield f"bfi.{t}", Form(t, (t, t, "u32", "u32"), _insert)
    yield "shf.r.wrap.b32", Form("b32", ("b32", "b32", "u32"), _funnel_right)
    yield "prmt.b32", Form("b32", ("b32", "b32", "b32"), _permute)
    for t in (*BITS, *SIGNED, *UNSIGNED, "f32", "f64"):
        yield f"selp.{t}", Form(t, (t, t, "pred"), _select)
        yield f"mov.{t}", Form(t, (t,), _same)
    yield "mov.pred", Form("pred", ("pred",), _same)
    # Each state space has its own range of the generic addresses.
    yield "cvta.to.global.u64", Form("u64", ("u64",), _same)


def _arithmetic(t: str) -> Iterator[tuple[str, Form]]:
    for name, function in _OF_TWO.items():
        yield f"{name}.{t}", Form(t, (t, t), function)
    yield f"mad.lo.{t}", Form(t, (t, t, t), lambda a, b, c: a * b + c)
    yield f"shr.{t}", Form(t, (t, "u32"), _shift_right)
    if t[1:] != "64":
        wide = f"{t[0]}{2 * int(t[1:])}"
        yield f"mul.wide.{t}", Form(wide, (t, t), _wide)
        yield f"mad.wide.{t}", Form(wide, (t, t, wide), lambda a, b, c: _wide(a, b) + c)
    if t[1:] != "16":
        yield f"bfe.{t}", Form(t, (t, "u32", "u32"), _extract)
    for name, function in (_COMPARISONS | (_OF_UNSIGNED if t[0] == "u" else {})).items():
        yield f"setp.{name}.{t}", Form("pred", (t, t), function)
        if name in ("eq", "ne"):
            yield f"setp.{name}.b{t[1:]}", Form("pred", (t, t), function)


def _conversions(t: str) -> Iterator[tuple[str, Form]]:
    for other in SIGNED + UNSIGNED:
        yield f"cvt.{other}.{t}", Form(other, (t,), _convert(other))
    for byte in ("u8", "s8"):
        yield f"cvt.{byte}.{t}", Form(byte, (t,), _convert(byte))
        yield f"cvt.{t}.{byte}", Form(t, (byte,), _convert(t))


def _same(a: Array) -> Array:
    return a
