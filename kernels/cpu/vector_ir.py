"""LLVM IR of vectors: what kernels need that Numba's own language cannot say.

Plain loops never become dot-product instructions, so the inner tiles are written as LLVM IR. The
functions here take an llvmlite `IRBuilder` and values, and know nothing of Numba: the same emitter
can be compiled for another processor in a test. Addresses are int64 values.

All vectors have LANES lanes of 32 bits (or the same number of bytes); LLVM splits them where
registers are shorter. `fma` rounds once everywhere, and nothing here may be reordered, so float32
results are the same bits on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from llvmlite import ir
from numba.core import cgutils

LANES: Final = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VOID: Final = ir.VoidType()
I32X: Final = ir.VectorType(I32, LANES)
F32X: Final = ir.VectorType(F32, LANES)
F16X: Final = ir.VectorType(F16, LANES)
I16X: Final = ir.VectorType(I16, LANES)
I8X: Final = ir.VectorType(I8, LANES)
BYTES: Final = ir.VectorType(I8, 4 * LANES)
"""64 bytes: four of each 32-bit lane."""

Builder: TypeAlias = ir.IRBuilder
Value: TypeAlias = ir.Value


class BFloat16Type(ir.types.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite does not know."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16Type)

    def __hash__(self) -> int:
        return hash(BFloat16Type)


BF16: Final = BFloat16Type()
BF16_PAIRS: Final = ir.VectorType(BF16, 2 * LANES)
"""Two bfloat16 of each 32-bit lane."""


def i64(value: int) -> ir.Constant:
    """Return an int64 constant."""
    return ir.Constant(I64, value)


def i32(value: int) -> ir.Constant:
    """Return an int32 constant."""
    return ir.Constant(I32, value)


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """Return a vector constant with `value` in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def offset(builder: Builder, address: Value, *terms: Value | int) -> Value:
    """Return `address` plus the terms, in bytes."""
    for term in terms:
        if isinstance(term, int):
            if term:
                address = builder.add(address, i64(term))
        else:
            address = builder.add(address, term)
    return address


def load(builder: Builder, address: Value, kind: ir.Type, align: int = 1) -> Value:
    """Load a value; `align` is what is known of the address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Builder, value: Value, address: Value, align: int = 1) -> None:
    """Store a value; `align` is what is known of the address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def gather(builder: Builder, address: Value, indices: Value) -> Value:
    """Load the float32 of an array at `address` that int32 lanes name, all from 0 on."""
    wide = ir.VectorType(I64, LANES)
    bytes_along = builder.shl(builder.zext(indices, wide), constant(wide, 2))
    addresses = builder.add(broadcast(builder, address), bytes_along)
    pointers = builder.inttoptr(addresses, ir.VectorType(F32.as_pointer(), LANES))
    mask = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1] * LANES)
    operands = [pointers, i32(4), mask, constant(F32X, 0.0)]
    return call(builder, "llvm.masked.gather.v16f32.v16p0", F32X, operands)


def broadcast(builder: Builder, scalar: Value, vector: ir.VectorType | None = None) -> Value:
    """Return a vector (by default of LANES lanes) with `scalar` in every lane."""
    kind = vector or ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, i32(0))
    zeros = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, undefined, zeros)


def call(
    builder: Builder,
    name: str,
    result: ir.Type,
    arguments: Sequence[Value],
    fastmath: Sequence[str] = (),
) -> Value:
    """Call an LLVM intrinsic or an external function by name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, list(arguments), fastmath=fastmath)


def fma(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x · y + z, rounded once."""
    return call(builder, "llvm.fma.v16f32", F32X, [x, y, z])


def maximum(builder: Builder, x: Value, y: Value) -> Value:
    """Return the larger of each lane; of a number and a NaN, the number."""
    return call(builder, "llvm.maxnum.v16f32", F32X, [x, y])


def bf16_low(builder: Builder, pairs: Value) -> Value:
    """Return the first bfloat16 of each pair, packed in int32 lanes, as float32."""
    return builder.bitcast(builder.shl(pairs, constant(I32X, 16)), F32X)


def bf16_high(builder: Builder, pairs: Value) -> Value:
    """Return the second bfloat16 of each pair, packed in int32 lanes, as float32."""
    return builder.bitcast(builder.and_(pairs, constant(I32X, 0xFFFF0000)), F32X)


def to_bf16(builder: Builder, x: Value) -> Value:
    """Return float32 lanes rounded to bfloat16 (to nearest, ties to even), as int16 lanes.

    Integer arithmetic, so the same on every processor: subnormal numbers are kept, NaN stays NaN.
    """
    bits = builder.bitcast(x, I32X)
    odd = builder.and_(builder.lshr(bits, constant(I32X, 16)), constant(I32X, 1))
    rounded = builder.add(bits, builder.add(odd, constant(I32X, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", x, x)
    quiet = builder.or_(bits, constant(I32X, 0x00400000))
    chosen = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(chosen, constant(I32X, 16)), I16X)


def fast_bf16(builder: Builder, x: Value) -> Value:
    """Return lanes rounded to bfloat16, by one instruction: subnormal numbers become 0."""
    kind = ir.VectorType(BF16, LANES)
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [x])
    return builder.bitcast(rounded, I16X)


EXP_LOWEST: Final = -87.0
LOG2_E: Final = 1.4426950408889634
LN2_HIGH: Final = 0.693359375
LN2_LOW: Final = -2.12194440e-4
EXP_COEFFICIENTS: Final = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip


def exp(builder: Builder, x: Value) -> Value:
    """Return e^x of lanes ≤ 88, within 2 units in the last place; e^−87 for everything below.

    x = n·ln 2 + r, |r| ≤ ln 2 / 2, then 2^n times a polynomial for e^r (coefficients of the Cephes
    library's expf, Moshier 1989).
    """
    x = maximum(builder, x, constant(F32X, EXP_LOWEST))
    scaled = builder.fmul(x, constant(F32X, LOG2_E))
    n = call(builder, "llvm.rint.v16f32", F32X, [scaled])
    r = fma(builder, n, constant(F32X, -LN2_HIGH), x)
    r = fma(builder, n, constant(F32X, -LN2_LOW), r)
    p: Value = constant(F32X, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = fma(builder, p, r, constant(F32X, coefficient))
    p = fma(builder, p, builder.fmul(r, r), builder.fadd(r, constant(F32X, 1.0)))
    exponent = builder.add(builder.fptosi(n, I32X), constant(I32X, 127))
    power = builder.bitcast(builder.shl(exponent, constant(I32X, 23)), F32X)
    return builder.fmul(p, power)


POWER_LOWEST: Final = -125.0
ROUND_BIAS: Final = 12582912.0
"""1.5 · 2^23: adding it rounds to an integer, which then stands in the low mantissa bits."""
POWER_COEFFICIENTS: Final = (
    0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0,
)  # fmt: skip
"""Of 2^r for |r| ≤ 1/2, highest power first: relative error below 1e-7 (minimax)."""
SHORT_POWER_COEFFICIENTS: Final = (0.009582853, 0.055906426, 0.24024099, 0.6931242, 1.0)
"""The same with a relative error below 3e-6: enough for weights rounded to bfloat16."""


def power_of_two(
    builder: Builder, x: Value, coefficients: Sequence[float] = POWER_COEFFICIENTS
) -> Value:
    """Return 2^x of lanes ≤ 127; 2^−125 for everything below −125; NaN stays NaN."""
    lowest = constant(F32X, POWER_LOWEST)
    x = builder.select(builder.fcmp_ordered(">", lowest, x), lowest, x)
    biased = builder.fadd(x, constant(F32X, ROUND_BIAS))
    r = builder.fsub(x, builder.fsub(biased, constant(F32X, ROUND_BIAS)))
    p: Value = constant(F32X, coefficients[0])
    for coefficient in coefficients[1:]:
        p = fma(builder, p, r, constant(F32X, coefficient))
    exponent = builder.shl(builder.bitcast(biased, I32X), constant(I32X, 23))
    return builder.bitcast(builder.add(builder.bitcast(p, I32X), exponent), F32X)


SECOND_LEVEL: Final = 2
"""Locality of a prefetch: into the second-level cache."""


def prefetch(
    builder: Builder, address: Value, locality: int = 3, *, is_written: bool = False
) -> None:
    """Ask for a cache line, to read or to write; locality 3 keeps it in all caches, 0 in none."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    arguments = [pointer, i32(int(is_written)), i32(locality), i32(1)]
    call(builder, "llvm.prefetch.p0", VOID, arguments)


def counted_loop(
    builder: Builder, count: Value, body: Callable[[Value], None], step: int = 1
) -> None:
    """Emit body(i) for i = 0, step, 2·step, … below `count` (int64)."""
    with cgutils.for_range_slice(builder, i64(0), count, i64(step)) as (index, _):
        body(index)
