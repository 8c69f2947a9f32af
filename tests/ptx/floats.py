"""What instructions on floats compute, lane by lane.

Without `.ftz` subnormal numbers are kept; rounding is to nearest, ties to even, once. The
approximations of the special-function unit are given correctly rounded, which is within what the
manual allows them.

Source: PTX ISA 9.0, chapters 9.7.3 (floating point), 9.7.4 (half precision), 9.7.9.21 (cvt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from tests.ptx.integers import Form, Function

Array: TypeAlias = Any  # of NumPy

_UNSIGNED = {4: np.uint32, 8: np.uint64}


# --- fused multiply-add, rounded once -------------------------------------------------------------


def sum_to_odd(p: Array, c: Array) -> Array:
    """Return p + c in float64, rounded to odd: what is rounded again is then rounded right.

    An inexact sum has its last bit set, so that it is no tie of any format two bits shorter
    (Boldo and Melquiond 2008).
    """
    total = p + c
    left = total - p
    error = (p - (total - left)) + (c - left)  # exact: Knuth's two-sum
    bits = total.view(np.int64)
    is_inexact = (error < 0) | (error > 0)
    # An even last bit: move by one towards the exact value.
    wrong = is_inexact & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    return (bits + np.where(wrong, np.where(away, 1, -1), 0)).view(np.float64)


def _fma_float32(a: Array, b: Array, c: Array) -> Array:
    p = a.astype(np.float64) * b  # exact
    total = p + c
    # A second rounding harms only where the first one made a tie; below the normal numbers of
    # float32 ties lie elsewhere.
    bits = total.view(np.int64)
    doubtful = (bits & 0x1FFF_FFFF == 0x1000_0000) | ((np.abs(total) < 2.0**-125) & (total != 0))
    if doubtful.any():
        total = sum_to_odd(p, c.astype(np.float64))
    return total.astype(np.float32)


def widen_bfloat16(bits: Array) -> Array:
    """Return 16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow_bfloat16(x: Array) -> Array:
    """Round float32 to the 16 bits of a bfloat16; NaN is 0x7FFF."""
    bits = x.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def widen_float16(bits: Array) -> Array:
    """Return 16 bits as float32, exactly."""
    return bits.view(np.float16).astype(np.float32)


def narrow_float16(x: Array) -> Array:
    """Round float32 or float64 to the 16 bits of a float16; NaN is 0x7FFF."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def _of_float16(function: Function) -> Function:
    # Of two float16 sum, difference and product are exact in float64.
    return lambda a, b: narrow_float16(
        function(*(x.view(np.float16).astype(np.float64) for x in (a, b)))
    )


def _to_float32_odd(x: Array) -> Array:
    near = x.astype(np.float32)
    bits = near.view(np.int32)
    bits = bits - (np.abs(near.astype(np.float64)) > np.abs(x))  # towards zero
    inexact = bits.view(np.float32).astype(np.float64) != x
    return (bits | (inexact & ~np.isnan(x))).astype(np.int32).view(np.float32)


def _narrow_sum_bfloat16(total: Array) -> Array:
    return narrow_bfloat16(_to_float32_odd(total))


WIDEN: dict[str, Function] = {"bf16": widen_bfloat16, "f16": widen_float16}
NARROW: dict[str, Function] = {"bf16": narrow_bfloat16, "f16": narrow_float16}
_NARROW_SUM: dict[str, Function] = {"bf16": _narrow_sum_bfloat16, "f16": narrow_float16}


def _fma_pairs(kind: str) -> Function:
    widen, narrow = WIDEN[kind], _NARROW_SUM[kind]

    def function(*words: Array) -> Array:
        a, b, c = (
            widen(np.ascontiguousarray(word).view(np.uint16)).astype(np.float64) for word in words
        )
        result: Array = narrow(sum_to_odd(a * b, c)).view(np.uint32)
        return result

    return function


# --- extremes -------------------------------------------------------------------------------------


def _extreme(larger: bool) -> Function:
    """Of a number and NaN the number; +0 is above -0."""
    is_mine, merge = (np.greater, np.bitwise_and) if larger else (np.less, np.bitwise_or)

    def function(a: Array, b: Array) -> Array:
        # Not fmax: that of NumPy gives NaN for a signalling NaN and a number, sometimes.
        unsigned = _UNSIGNED[a.itemsize]
        mine, other = a.view(unsigned), b.view(unsigned)
        chosen = np.where(is_mine(a, b) | (b != b), mine, other)
        return np.where(a == b, merge(mine, other), chosen).view(a.dtype)

    return function


# --- special functions ----------------------------------------------------------------------------


def flush(x: Array) -> Array:
    """Return subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def _approximate(function: Callable[[Array], Array], flushes: bool) -> Function:
    def plain(x: Array) -> Array:
        return function(x.astype(np.float64)).astype(np.float32)

    return (lambda x: flush(plain(flush(x)))) if flushes else plain


# --- conversions ----------------------------------------------------------------------------------


def _to_integer(dtype: type, rounding: Callable[[Array], Array]) -> Function:
    limits = np.iinfo(dtype)

    def function(x: Array) -> Array:
        whole = rounding(x.astype(np.float64))
        # NaN is 0 between 32 bits; with 64 on either side it is the highest bit alone.
        of_nan = 0
        if x.itemsize == 8 or limits.bits == 64:
            of_nan = limits.min if limits.min < 0 else 1 << limits.bits - 1
        above, below = whole >= float(limits.max), whole <= float(limits.min)
        inside: Array = np.where(above | below | np.isnan(whole), 0.0, whole).astype(dtype)
        clamped = np.where(above, limits.max, np.where(below, limits.min, inside))
        return np.where(np.isnan(whole), of_nan, clamped).astype(dtype)

    return function


def _pair(kind: str) -> Function:
    narrow = NARROW[kind]

    def function(upper: Array, lower: Array) -> Array:
        return narrow(upper).astype(np.uint32) << np.uint32(16) | narrow(lower)

    return function


# --- comparisons ----------------------------------------------------------------------------------

_ORDERED: dict[str, Function] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip
_UNORDERED: dict[str, Function] = {
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


_OF_TWO: dict[str, Function] = {
    "add": np.add, "add.rn": np.add, "sub": np.subtract, "sub.rn": np.subtract,
    "mul": np.multiply, "mul.rn": np.multiply, "div.rn": np.divide,
    "min": _extreme(larger=False), "max": _extreme(larger=True),
}  # fmt: skip
_APPROXIMATED: dict[str, Function] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}  # fmt: skip


def float_forms() -> Iterator[tuple[str, Form]]:
    """Return opcode, form of every instruction on floats."""
    for t in ("f32", "f64"):
        for name, function in _OF_TWO.items():
            yield f"{name}.{t}", Form(t, (t, t), function)
        yield f"neg.{t}", Form(t, (t,), np.negative)
        yield f"abs.{t}", Form(t, (t,), np.abs)
        yield f"sqrt.rn.{t}", Form(t, (t,), np.sqrt)
        for name, function in {**_ORDERED, **_UNORDERED}.items():
            yield f"setp.{name}.{t}", Form("pred", (t, t), function)
        for integer in ("s32", "u32", "s64", "u64"):
            dtype = np.dtype(("i" if integer[0] == "s" else "u") + str(int(integer[1:]) // 8)).type
            yield f"cvt.rni.{integer}.{t}", Form(integer, (t,), _to_integer(dtype, np.rint))
            yield f"cvt.rzi.{integer}.{t}", Form(integer, (t,), _to_integer(dtype, np.trunc))
            float_type = {"f32": np.float32, "f64": np.float64}[t]
            yield f"cvt.rn.{t}.{integer}", Form(t, (integer,), _to_float(float_type))
    for name in ("add", "sub", "mul", "add.rn", "sub.rn", "mul.rn"):
        yield f"{name}.f16", Form("b16", ("b16", "b16"), _of_float16(_OF_TWO[name]))
    yield "fma.rn.f32", Form("f32", ("f32",) * 3, _fma_float32)
    for kind in ("bf16", "f16"):
        yield f"fma.rn.{kind}x2", Form("b32", ("b32",) * 3, _fma_pairs(kind))
        yield f"cvt.rn.{kind}x2.f32", Form("b32", ("f32", "f32"), _pair(kind))
        yield f"cvt.rn.{kind}.f32", Form("b16", ("f32",), NARROW[kind])
        yield f"cvt.f32.{kind}", Form("f32", ("b16",), WIDEN[kind])
    yield "cvt.rn.f32.f64", Form("f32", ("f64",), _to_float(np.float32))
    yield "cvt.f64.f32", Form("f64", ("f32",), _to_float(np.float64))
    for name, function in _APPROXIMATED.items():
        yield f"{name}.approx.ftz.f32", Form("f32", ("f32",), _approximate(function, flushes=True))
        yield f"{name}.approx.f32", Form("f32", ("f32",), _approximate(function, flushes=False))


def _to_float(dtype: type) -> Function:
    return lambda x: x.astype(dtype)
