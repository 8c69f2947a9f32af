"""Keys and values in eight bits, as LLVM IR: codes and scales of rows, and codes as bfloat16.

What codes mean is said in `kernels.reference.quantized_kv`; these write the same bytes, but in rows
whose scale is NaN, where codes mean nothing. bfloat16 holds every code of both types exactly.

A float8 is s eeee mmm. Put into a bfloat16, whose exponent has a bias of 127 instead of 7, it is

    e > 0    s eeee mmm << 4  +  120 << 7         s at the top
    e = 0    m · 2^−9                             one of eight numbers

All sets of 512 bits have the instruction that looks up 32 numbers of 16 bits at once (VPERMW); it
replaces the lanes where e is 0. Elsewhere both are one formula in float32: with r as in the first
line, the number is the smaller of r and 2 · r − 2^−6, which meet in 2^−6 (e is 1, m is 0).

The code 1111 111 stands for NaN, but nobody writes it: it is read as 480, so that what lies in
places never written is a number, and a weight of 0 times it is 0.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.vector_ir import (
    BF16_PAIRS,
    F32,
    F32X,
    I8,
    I8X,
    I16,
    I16X,
    I32X,
    LANES,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    maximum,
    offset,
    store,
)
from kernels.reference.quantized_kv import LARGEST, from_float8

VECTOR_BYTES: Final = 64
CODES: Final = ir.VectorType(I8, 2 * LANES)
WORDS: Final = ir.VectorType(I16, 2 * LANES)
"""Codes of 32 numbers, and the same number of bfloat16."""

SMALLEST_NORMAL: Final = 2.0**-6
SMALLEST: Final = 2.0**-9
"""Of float8: where e is 1 and m is 0, and the other way round."""
SMALL_CODES: Final = 8
"""Codes below have an exponent of 0."""


def row_scale(builder: Builder, dtype: str, row: Value, dim: Value, place: Value) -> Value:
    """Store the scale of float32 row [D'] at `place`; return, in all lanes, what codes it.

    The scale of a row with a NaN or an infinity is NaN.
    """
    largest_at, poison_at = (_variable(builder) for _ in range(2))

    def body(first: Value) -> None:
        x = load(builder, offset(builder, row, builder.shl(first, i64(2))), F32X)
        size = call(builder, "llvm.fabs.v16f32", F32X, [x])
        builder.store(maximum(builder, builder.load(largest_at), size), largest_at)
        poison = fma(builder, x, constant(F32X, 0.0), builder.load(poison_at))
        builder.store(poison, poison_at)

    counted_loop(builder, dim, body, LANES)
    vector = builder.load(largest_at)
    largest = call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [vector], ["nnan"])
    poison = builder.load(poison_at)
    is_poisoned = call(
        builder, "llvm.vector.reduce.or.v16i1", ir.IntType(1),
        [builder.fcmp_unordered("uno", poison, poison)],
    )  # fmt: skip
    limit = ir.Constant(F32, LARGEST[dtype])
    scale = builder.fdiv(largest, limit)
    scale = builder.select(is_poisoned, ir.Constant(F32, float("nan")), scale)
    store(builder, scale, place)
    is_positive = builder.fcmp_ordered(">", largest, ir.Constant(F32, 0.0))
    divisor = builder.select(is_positive, largest, ir.Constant(F32, 1.0))
    return broadcast(builder, builder.fdiv(limit, divisor))


def row_codes(builder: Builder, dtype: str, x: Value, inverse: Value) -> Value:
    """Return the codes of 16 numbers of a row, as int8 lanes; `inverse`: from `row_scale`."""
    scaled = builder.fmul(x, inverse)
    # `inverse` is infinite for rows near float32's smallest numbers: 0 times it is to be 0.
    is_number = builder.fcmp_ordered("ord", scaled, scaled)
    scaled = builder.select(is_number, scaled, constant(F32X, 0.0))
    for limit, order in ((LARGEST[dtype], ">"), (-LARGEST[dtype], "<")):
        bound = constant(F32X, limit)
        scaled = builder.select(builder.fcmp_ordered(order, scaled, bound), bound, scaled)
    codes = _nearest(builder, scaled) if dtype == "int8" else _float8_codes(builder, scaled)
    return builder.trunc(codes, I8X)


def _float8_codes(builder: Builder, x: Value) -> Value:
    """Return numbers up to 448 in magnitude as float8, in int32 lanes, ties to even."""
    bits = builder.bitcast(x, I32X)
    magnitude = builder.and_(bits, constant(I32X, 0x7FFF_FFFF))
    # The exponent's bias falls from 127 to 7, 20 bits of the fraction go; a carry raises it.
    odd = builder.and_(builder.lshr(magnitude, constant(I32X, 20)), constant(I32X, 1))
    rounded = builder.add(builder.add(magnitude, constant(I32X, 0x7_FFFF)), odd)
    normal = builder.sub(builder.lshr(rounded, constant(I32X, 20)), constant(I32X, 120 << 3))
    size = builder.bitcast(magnitude, F32X)
    small = _nearest(builder, builder.fmul(size, constant(F32X, 1 / SMALLEST)))
    is_small = builder.fcmp_ordered("<", size, constant(F32X, SMALLEST_NORMAL))
    sign = builder.and_(builder.lshr(bits, constant(I32X, 24)), constant(I32X, 0x80))
    return builder.or_(builder.select(is_small, small, normal), sign)


def _nearest(builder: Builder, x: Value) -> Value:
    return builder.fptosi(call(builder, "llvm.rint.v16f32", F32X, [x]), I32X)


@emitted(types.void, *[types.int64] * 3)
def widen_int8(builder: Builder, x: Value, count: Value, out: Value) -> None:
    """Write int8 [count], a multiple of 64, as bfloat16."""
    chosen = selected_instruction_set()

    def integers(at: Value) -> Value:
        if chosen.has_bf16_dot or chosen.has_amx:
            low, high = (
                builder.sitofp(
                    builder.sext(load(builder, offset(builder, at, shift), I8X), I32X), F32X
                )
                for shift in (0, LANES)
            )
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            return call(builder, name, BF16_PAIRS, [high, low])
        # Each lane holds a pair of integers: shifted up and down again, one keeps its sign.
        pairs = builder.zext(load(builder, at, I16X), I32X)
        low, high = (
            builder.bitcast(builder.sitofp(builder.ashr(moved, constant(I32X, 24)), F32X), I32X)
            for moved in (builder.shl(pairs, constant(I32X, shift)) for shift in (24, 16))
        )
        kept = builder.and_(high, constant(I32X, 0xFFFF_0000))
        return builder.or_(builder.lshr(low, constant(I32X, 16)), kept)

    _widen(builder, x, count, out, integers)


@emitted(types.void, *[types.int64] * 3)
def widen_float8(builder: Builder, x: Value, count: Value, out: Value) -> None:
    """Write float8 [count], a multiple of 64, as bfloat16."""
    has_lookup = selected_instruction_set().vector_bits == 512

    def numbers(at: Value) -> Value:
        codes = builder.sext(load(builder, at, CODES), WORDS)  # the sign is in its place
        sizes = (_looked_up if has_lookup else _computed)(builder, codes)
        return builder.or_(sizes, builder.and_(codes, constant(WORDS, 0x8000)))

    _widen(builder, x, count, out, numbers)


def _looked_up(builder: Builder, codes: Value) -> Value:
    """Return the magnitudes of float8 in int16 lanes as bfloat16."""
    size = builder.and_(codes, constant(WORDS, 0x7F))
    raised = builder.add(builder.shl(size, constant(WORDS, 4)), constant(WORDS, 120 << 7))
    operands = [ir.Constant(WORDS, _SMALL_NUMBERS), size]
    small = call(builder, "llvm.x86.avx512.permvar.hi.512", WORDS, operands)
    is_small = builder.icmp_unsigned("<", size, constant(WORDS, SMALL_CODES))
    return builder.select(is_small, small, raised)


def _computed(builder: Builder, codes: Value) -> Value:
    """Return the same, computed in float32: lanes of even number, then the others."""
    pairs = builder.bitcast(codes, I32X)

    def sizes(shift: int) -> Value:
        bits = builder.and_(builder.shl(pairs, constant(I32X, shift)), constant(I32X, 0x7F << 20))
        raised = builder.bitcast(builder.add(bits, constant(I32X, 120 << 23)), F32X)
        twice = builder.fadd(raised, raised)
        less = builder.fsub(twice, constant(F32X, SMALLEST_NORMAL))
        smaller = builder.select(builder.fcmp_ordered("<", less, raised), less, raised)
        return builder.bitcast(smaller, I32X)

    both = builder.or_(builder.lshr(sizes(20), constant(I32X, 16)), sizes(4))
    return builder.bitcast(both, WORDS)


def _widen(builder: Builder, x: Value, count: Value, out: Value, pairs: Any) -> None:  # noqa: ANN401
    """Emit the loop over codes [count]: pairs(address) are 32 of them as bfloat16."""

    def body(first: Value) -> None:
        for at in (0, 2 * LANES):
            halves = pairs(offset(builder, x, first, at))
            to = offset(builder, out, builder.shl(first, i64(1)), 2 * at)
            store(builder, halves, to, VECTOR_BYTES)

    counted_loop(builder, count, body, 4 * LANES)


def _variable(builder: Builder) -> Value:
    """Return a vector variable that holds zeros."""
    place = cgutils.alloca_once(builder, F32X)
    builder.store(constant(F32X, 0.0), place)
    return place


_SMALL_NUMBERS: Final = [
    int(bits) >> 16 for bits in from_float8(np.arange(SMALL_CODES, dtype=np.uint8)).view(np.uint32)
] * (2 * LANES // SMALL_CODES)
"""The bits of m · 2^−9 as bfloat16, again and again: VPERMW looks at five bits of a code."""

WIDEN: Final = {"int8": widen_int8, "float8": widen_float8}
"""void(codes, count, out) by type of pool: codes [count], a multiple of 64, as bfloat16."""
