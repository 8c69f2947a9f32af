"""The inner loops of sampling: blocks of 64 tokens, as LLVM IR.

All of it is exact (comparisons, integers, or float64 operations rounded one by one), so the results
are the same bits on every instruction set. Nothing may be fused: these functions, and all that
reckon with floats around them, are called in `unfused` functions only.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.sample_record import BLOCK
from kernels.cpu.vector_ir import (
    F32,
    F32X,
    I16,
    I32,
    I32X,
    I64,
    LANES,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    counted_loop,
    i64,
    load,
    offset,
    store,
)
from kernels.reference import exponential
from kernels.reference.logit_adjustments import LARGEST, LEAST_ALLOWED

I1: Final = ir.IntType(1)
F64: Final = ir.DoubleType()
F64X: Final = ir.VectorType(F64, LANES)
I64X: Final = ir.VectorType(I64, LANES)

COUNT_SHIFT: Final = 48
"""`in_block` counts from this bit on; 64 weights sum to at most 2^46."""

WEIGHT_BITS: Final = 40
EXPONENT_BIAS: Final = 1023
MANTISSA_BITS: Final = 52
INTEGER_BIAS: Final = 2.0**52
"""Added to a number from 0 to 2^51, it leaves the nearest integer in the low bits."""
INTEGER_BIAS_BITS: Final = (EXPONENT_BIAS + 52) << MANTISSA_BITS


@emitted(types.float32, types.int64)
def low_float(builder: Builder, bits: Value) -> Value:
    """Return the float32 whose bits are the low ones of an int64."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


def floats(value: float) -> Value:
    """Return a float64 vector constant."""
    return constant(F64X, value)


def ints(value: int) -> Value:
    """Return an int64 vector constant."""
    return constant(I64X, value)


def weights_of(builder: Builder, logits: Value, largest: Value, scale: Value) -> Value:
    """Return floor(e^((logit − largest) · scale) · 2^40) of 16 logits, as int64.

    `kernels.reference.exponential.exp`, operation by operation. Multiplying by 2^(n + 40) only sets
    the exponent, so it is exact, and the rounding up that the conversion may do is taken back.
    """
    wide = builder.fpext(logits, F64X)
    x = builder.fmul(builder.fsub(wide, largest), scale)
    lowest = floats(exponential.LOWEST)
    x = builder.select(builder.fcmp_ordered(">", x, lowest), x, lowest)
    bias = floats(exponential.ROUND_BIAS)
    biased = builder.fadd(builder.fmul(x, floats(exponential.LOG2_E)), bias)
    n = builder.fsub(biased, bias)
    r = builder.fsub(x, builder.fmul(n, floats(exponential.LN2_HIGH)))
    r = builder.fsub(r, builder.fmul(n, floats(exponential.LN2_LOW)))
    p: Value = floats(exponential.EXP_COEFFICIENTS[0])
    for coefficient in exponential.EXP_COEFFICIENTS[1:]:
        p = builder.fadd(builder.fmul(p, r), floats(coefficient))
    exponent = builder.add(builder.bitcast(biased, I64X), ints(EXPONENT_BIAS + WEIGHT_BITS))
    power = builder.bitcast(builder.shl(exponent, ints(MANTISSA_BITS)), F64X)
    weight = builder.fmul(p, power)
    nearest = builder.fadd(weight, floats(INTEGER_BIAS))
    is_above = builder.fcmp_ordered(">", builder.fsub(nearest, floats(INTEGER_BIAS)), weight)
    integer = builder.sub(builder.bitcast(nearest, I64X), ints(INTEGER_BIAS_BITS))
    return builder.add(integer, builder.sext(is_above, I64X))


@emitted(types.void, *[types.int64] * 5, types.float64, types.float64)
def weigh_blocks(
    builder: Builder,
    logits: Value,
    num_blocks: Value,
    weights: Value,
    largest_weights: Value,
    totals: Value,
    largest: Value,
    scale: Value,
) -> None:
    """Write the weights of blocks of logits, and each block's largest weight and sum.

    `logits`: float32 [num_blocks · 64]; `weights`: int64, as many; `largest_weights`, `totals`:
    int64 [num_blocks].
    """
    wide_largest, wide_scale = broadcast(builder, largest), broadcast(builder, scale)

    def block(index: Value) -> None:
        first = builder.mul(index, i64(BLOCK))
        most: Value = ints(0)
        total: Value = ints(0)
        for part in range(0, BLOCK, LANES):
            place = builder.add(first, i64(part))
            row = load(builder, offset(builder, logits, builder.mul(place, i64(4))), F32X, 4)
            weight = weights_of(builder, row, wide_largest, wide_scale)
            store(builder, weight, offset(builder, weights, builder.mul(place, i64(8))), 8)
            total = builder.add(total, weight)
            most = builder.select(builder.icmp_signed(">", weight, most), weight, most)
        place = builder.mul(index, i64(8))
        sum_of_block = call(builder, "llvm.vector.reduce.add.v16i64", I64, [total])
        store(builder, sum_of_block, offset(builder, totals, place), 8)
        largest_of_block = call(builder, "llvm.vector.reduce.smax.v16i64", I64, [most])
        store(builder, largest_of_block, offset(builder, largest_weights, place), 8)

    counted_loop(builder, num_blocks, block)


@emitted(types.void, *[types.int64] * 3)
def keep_allowed(builder: Builder, logits: Value, num_blocks: Value, allowed: Value) -> None:
    """Give tokens that a mask does not allow the smallest number, keep the others above it.

    `logits`: float32 [num_blocks · 64]. `allowed`: a bit for each, the lowest of a byte first.
    """
    lowest, least = constant(F32X, float(-LARGEST)), constant(F32X, float(LEAST_ALLOWED))

    def block(index: Value) -> None:
        for part in range(0, BLOCK, LANES):
            place = builder.add(builder.mul(index, i64(BLOCK)), i64(part))
            bits = load(builder, offset(builder, allowed, builder.lshr(place, i64(3))), I16, 1)
            is_allowed = builder.bitcast(bits, ir.VectorType(I1, LANES))
            address = offset(builder, logits, builder.mul(place, i64(4)))
            x = load(builder, address, F32X, 4)
            x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
            store(builder, builder.select(is_allowed, x, lowest), address, 4)

    counted_loop(builder, num_blocks, block)


@emitted(types.int64, *[types.int64] * 3)
def in_block(builder: Builder, weights: Value, low: Value, high: Value) -> Value:
    """Return the sum of a block's weights from low to high − 1, plus 2^COUNT_SHIFT for each."""
    wide_low, wide_high = broadcast(builder, low), broadcast(builder, high)
    total: Value = ints(0)
    for part in range(0, BLOCK, LANES):
        weight = load(builder, offset(builder, weights, 8 * part), I64X, 8)
        counted = builder.add(weight, ints(1 << COUNT_SHIFT))
        is_in = builder.and_(
            builder.icmp_signed(">=", weight, wide_low),
            builder.icmp_signed("<", weight, wide_high),
        )
        total = builder.add(total, builder.select(is_in, counted, ints(0)))
    return call(builder, "llvm.vector.reduce.add.v16i64", I64, [total])


@emitted(types.int64, types.int64, types.int64)
def extremes(builder: Builder, row: Value, num_blocks: Value) -> Value:
    """Return the bits of the largest of some blocks of float32, and of the largest magnitude.

    The largest stands in the low 32 bits; ±0 may stand for each other. The magnitude stands in the
    high ones: it is at least infinity's, 0x7F800000, if a number is not finite, and then the
    largest means nothing.
    """
    parts = BLOCK // LANES
    lowest, none = constant(F32X, float("-inf")), constant(I32X, 0)
    largest = [cgutils.alloca_once_value(builder, lowest) for _ in range(parts)]
    magnitude = [cgutils.alloca_once_value(builder, none) for _ in range(parts)]

    def block(index: Value) -> None:
        first = offset(builder, row, builder.mul(index, i64(4 * BLOCK)))
        for part in range(parts):
            x = load(builder, offset(builder, first, 4 * LANES * part), F32X, 4)
            best = builder.load(largest[part])
            is_larger = builder.fcmp_ordered(">", x, best)
            builder.store(builder.select(is_larger, x, best), largest[part])
            bits = builder.and_(builder.bitcast(x, I32X), constant(I32X, 0x7FFFFFFF))
            most = builder.load(magnitude[part])
            is_more = builder.icmp_signed(">", bits, most)
            builder.store(builder.select(is_more, bits, most), magnitude[part])

    counted_loop(builder, num_blocks, block)
    best, most = builder.load(largest[0]), builder.load(magnitude[0])
    for part in range(1, parts):
        x, bits = builder.load(largest[part]), builder.load(magnitude[part])
        best = builder.select(builder.fcmp_ordered(">", x, best), x, best)
        most = builder.select(builder.icmp_signed(">", bits, most), bits, most)
    width = LANES
    while width > 1:
        width //= 2
        best = _larger_half(builder, best, width)
    only = builder.extract_element(best, ir.Constant(I32, 0))
    largest_magnitude = call(builder, "llvm.vector.reduce.smax.v16i32", I32, [most])
    low = builder.zext(builder.bitcast(only, I32), I64)
    return builder.or_(builder.shl(builder.zext(largest_magnitude, I64), i64(32)), low)


def _larger_half(builder: Builder, x: Value, width: int) -> Value:
    """Return the larger ones of a float32 vector's first and second `width` lanes."""
    undefined = ir.Constant(ir.VectorType(F32, 2 * width), ir.Undefined)
    halves = [
        builder.shuffle_vector(
            x,
            undefined,
            ir.Constant(ir.VectorType(I32, width), list(range(first, first + width))),
        )
        for first in (0, width)
    ]
    return builder.select(builder.fcmp_ordered(">", *halves), *halves)
