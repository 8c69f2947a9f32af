"""Sines, biases, head norms, rotation and the store of one token's K and V, as LLVM IR.

Everything goes element by element in vectors of 16 lanes; a row that is no multiple of 16 ends in a
masked vector. All float32 arithmetic is written out with fused multiply-adds, so the bits are the
same on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types

from kernels.cpu.eight_bits import row_codes, row_scale
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.row_values import inverse_root_mean_square
from kernels.cpu.vector_ir import (
    F32,
    F32X,
    I16,
    I16X,
    I32,
    I32X,
    I64,
    LANES,
    VOID,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    counted_loop,
    fma,
    i32,
    i64,
    load,
    offset,
    store,
    to_bf16,
)
from kernels.reference.quantized_kv import LARGEST

F64X: Final = ir.VectorType(ir.DoubleType(), LANES)
I1X: Final = ir.VectorType(ir.IntType(1), LANES)
VECTOR_BYTES: Final = 64

TWO_OVER_PI: Final = 0.6366197723675814
HALF_PI: Final = 1.5707963267948966
HALF_PI_REST: Final = 6.123233995736766e-17
"""π/2 is the sum of both within 2^-110."""
SINE: Final = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COSINE: Final = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
"""Coefficients of the Cephes library's sinf and cosf (Moshier 1989), for |r| ≤ π/4."""


def _masked_vectors(
    builder: Builder, count: Value, body: Callable[[Value, Value | None], None]
) -> None:
    """Emit body(bytes, mask) for 16 elements at a time; mask None where all 16 are there."""
    whole = builder.and_(count, i64(-LANES))
    counted_loop(builder, whole, lambda first: body(builder.shl(first, i64(2)), None), LANES)
    rest = builder.sub(count, whole)
    with builder.if_then(builder.icmp_signed("!=", rest, i64(0)), likely=False):
        lanes = ir.Constant(I32X, list(range(LANES)))
        mask = builder.icmp_signed("<", lanes, broadcast(builder, builder.trunc(rest, I32)))
        body(builder.shl(whole, i64(2)), mask)


def _load(builder: Builder, address: Value, mask: Value | None) -> Value:
    """Load 16 float32; those outside of the mask are 0 and not read."""
    if mask is None:
        return load(builder, address, F32X)
    pointer = builder.inttoptr(address, F32X.as_pointer())
    operands = [pointer, i32(1), mask, constant(F32X, 0.0)]
    return call(builder, "llvm.masked.load.v16f32.p0", F32X, operands)


def _store(builder: Builder, value: Value, address: Value, mask: Value | None) -> None:
    """Store 16 float32; those outside of the mask are not written."""
    if mask is None:
        store(builder, value, address)
        return
    pointer = builder.inttoptr(address, F32X.as_pointer())
    call(builder, "llvm.masked.store.v16f32.p0", VOID, [value, pointer, i32(1), mask])


@emitted(types.void, types.float32, *[types.int64] * 5)
def sines_of_position(
    builder: Builder,
    position: Value,
    frequencies: Value,
    half: Value,
    factors: Value,
    cosines: Value,
    sines: Value,
) -> None:
    """Write cos and sin of position · frequency, times their factor, all float32 [half].

    Before the factor they are within 2 units of the last place for every float32 angle below 2^31;
    where the frequency is 0 they are 1 and 0. The angle is rounded to float32, as the models were
    trained. It is brought to ± π/4 in float64, where nothing is lost, and the rest are polynomials
    in float32.
    """

    def body(at: Value, mask: Value | None) -> None:
        frequency = _load(builder, offset(builder, frequencies, at), mask)
        scale = _load(builder, offset(builder, factors, at), mask)
        cosine, sine = _cosine_sine(builder, builder.fmul(broadcast(builder, position), frequency))
        _store(builder, builder.fmul(cosine, scale), offset(builder, cosines, at), mask)
        _store(builder, builder.fmul(sine, scale), offset(builder, sines, at), mask)

    _masked_vectors(builder, half, body)


def _cosine_sine(builder: Builder, angle: Value) -> tuple[Value, Value]:
    """Return cos and sin of 16 angles."""
    wide = builder.fpext(angle, F64X)
    turns = builder.fmul(wide, constant(F64X, TWO_OVER_PI))
    quarters = call(builder, "llvm.rint.v16f64", F64X, [turns])
    rest = wide
    for part in (HALF_PI, HALF_PI_REST):
        rest = call(builder, "llvm.fma.v16f64", F64X, [quarters, constant(F64X, -part), rest])
    r = builder.fptrunc(rest, F32X)
    z = builder.fmul(r, r)
    p: Value = constant(F32X, SINE[0])
    for coefficient in SINE[1:]:
        p = fma(builder, p, z, constant(F32X, coefficient))
    sine = fma(builder, builder.fmul(p, z), r, r)
    p = constant(F32X, COSINE[0])
    for coefficient in COSINE[1:]:
        p = fma(builder, p, z, constant(F32X, coefficient))
    p = fma(builder, p, z, constant(F32X, -0.5))
    cosine = fma(builder, p, z, constant(F32X, 1.0))
    # Quarter turns: 1 and 3 swap sine and cosine; the signs are + + − − for the sine.
    quarter = builder.fptosi(quarters, I32X)
    swaps = builder.icmp_signed("!=", builder.and_(quarter, constant(I32X, 1)), constant(I32X, 0))
    sine, cosine = builder.select(swaps, cosine, sine), builder.select(swaps, sine, cosine)
    next_quarter = builder.add(quarter, constant(I32X, 1))
    return _signed(builder, cosine, next_quarter), _signed(builder, sine, quarter)


def _signed(builder: Builder, x: Value, quarter: Value) -> Value:
    """Return x, negated where bit 1 of `quarter` is set."""
    sign = builder.shl(builder.and_(quarter, constant(I32X, 2)), constant(I32X, 30))
    return builder.bitcast(builder.xor(builder.bitcast(x, I32X), sign), F32X)


@emitted(types.void, *[types.int64] * 4)
def add_bias(builder: Builder, x: Value, bias: Value, count: Value, out: Value) -> None:
    """Write x + bias, float32 [count], to `out`."""

    def body(at: Value, mask: Value | None) -> None:
        both = (_load(builder, offset(builder, base, at), mask) for base in (x, bias))
        _store(builder, builder.fadd(*both), offset(builder, out, at), mask)

    _masked_vectors(builder, count, body)


@emitted(types.void, *[types.int64] * 5)
def norm_head(
    builder: Builder, x: Value, weight: Value, dim: Value, epsilon: Value, out: Value
) -> None:
    """Write x · weight / sqrt(mean(x²) + epsilon) of one head, float32 [dim], to `out`.

    `epsilon`: the bits of a float32. `out` may be x.
    """
    bits = builder.bitcast(builder.trunc(epsilon, I32), F32)
    factor = broadcast(builder, inverse_root_mean_square(builder, x, dim, bits))

    def body(at: Value, mask: Value | None) -> None:
        value, scale = (_load(builder, offset(builder, base, at), mask) for base in (x, weight))
        scaled = builder.fmul(builder.fmul(value, factor), scale)
        _store(builder, scaled, offset(builder, out, at), mask)

    _masked_vectors(builder, dim, body)


@emitted(types.void, *[types.int64] * 4, types.float32, types.int64)
def rotate_head(
    builder: Builder, x: Value, cosines: Value, sines: Value, half: Value, scale: Value, out: Value
) -> None:
    """Write scale · (x rotated) of one head, float32 [2·half], to `out`, which is not x."""

    def body(at: Value, mask: Value | None) -> None:
        above = builder.add(at, builder.shl(half, i64(2)))
        low, high, cosine, sine = (
            _load(builder, offset(builder, base, where), mask)
            for base, where in ((x, at), (x, above), (cosines, at), (sines, at))
        )
        factor = broadcast(builder, scale)
        first = fma(builder, low, cosine, builder.fneg(builder.fmul(high, sine)))
        second = fma(builder, high, cosine, builder.fmul(low, sine))
        _store(builder, builder.fmul(first, factor), offset(builder, out, at), mask)
        _store(builder, builder.fmul(second, factor), offset(builder, out, above), mask)

    _masked_vectors(builder, half, body)


@emitted(types.void, *[types.int64] * 2, types.float32)
def scale_row(builder: Builder, x: Value, count: Value, scale: Value) -> None:
    """Multiply float32 [count] at x by a number."""
    factor = broadcast(builder, scale)

    def body(at: Value, mask: Value | None) -> None:
        place = offset(builder, x, at)
        _store(builder, builder.fmul(_load(builder, place, mask), factor), place, mask)

    _masked_vectors(builder, count, body)


@emitted(types.void, *[types.int64] * 3)
def copy_padded(builder: Builder, x: Value, count: Value, out: Value) -> None:
    """Copy float32 x [count] to `out`, filled up with zeros to whole vectors."""

    def body(at: Value, mask: Value | None) -> None:
        store(builder, _load(builder, offset(builder, x, at), mask), offset(builder, out, at))

    _masked_vectors(builder, count, body)


def _vectors(builder: Builder, dim: Value, body: Callable[[Value], None]) -> None:
    """Emit body(first element) for the vectors of a padded row."""
    counted_loop(builder, dim, body, LANES)


def _strided(builder: Builder, lanes: Value, address: Value, stride: int) -> None:
    """Store each lane by itself, `stride` bytes apart."""
    for lane in range(lanes.type.count):
        value = builder.extract_element(lanes, i32(lane))
        store(builder, value, offset(builder, address, lane * stride))


@emitted(types.void, *[types.int64] * 5)
def store_float32(
    builder: Builder, key: Value, value: Value, dim: Value, value_dim: Value, places: Value
) -> None:
    """Store a token's K and V, float32 [D'] and [V'].

    `places`: address of the token's lane of K, and of its row of V, two int64.
    """
    key_at, value_at = (load(builder, offset(builder, places, i), I64) for i in (0, 8))

    def of_key(first: Value) -> None:
        lanes = load(builder, offset(builder, key, builder.shl(first, i64(2))), F32X)
        _strided(builder, lanes, offset(builder, key_at, builder.shl(first, i64(6))), VECTOR_BYTES)

    def of_value(first: Value) -> None:
        at = builder.shl(first, i64(2))
        row = load(builder, offset(builder, value, at), F32X)
        store(builder, row, offset(builder, value_at, at))

    _vectors(builder, dim, of_key)
    _vectors(builder, value_dim, of_value)


@emitted(types.void, *[types.int64] * 5)
def store_bfloat16(
    builder: Builder, key: Value, value: Value, dim: Value, value_dim: Value, places: Value
) -> None:
    """Store a token's K and V, rounded to bfloat16.

    `places`: as for `store_float32`, but of V the token's half of the first pair.
    """
    key_at, value_at = (load(builder, offset(builder, places, i), I64) for i in (0, 8))

    def of_key(first: Value) -> None:
        row = load(builder, offset(builder, key, builder.shl(first, i64(2))), F32X)
        pairs = builder.bitcast(to_bf16(builder, row), ir.VectorType(I32, LANES // 2))
        _strided(builder, pairs, offset(builder, key_at, builder.shl(first, i64(5))), VECTOR_BYTES)

    def of_value(first: Value) -> None:
        at = builder.shl(first, i64(2))
        row = to_bf16(builder, load(builder, offset(builder, value, at), F32X))
        _store_halves(builder, row, offset(builder, value_at, at))

    _vectors(builder, dim, of_key)
    _vectors(builder, value_dim, of_value)


def _store_halves(builder: Builder, row: Value, address: Value) -> None:
    """Store 16 int16 every 4 bytes, and touch nothing between: that is another token's."""
    if selected_instruction_set().vector_bits != 512:
        _strided(builder, row, address, 4)
        return
    # Every second 16 bits of one masked store; the lanes between are not written.
    wide = ir.VectorType(I16, 2 * LANES)
    undefined = ir.Constant(I16X, ir.Undefined)
    order = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 for i in range(2 * LANES)])
    doubled = builder.shuffle_vector(row, undefined, order)
    mask = ir.Constant(ir.VectorType(ir.IntType(1), 2 * LANES), [1, 0] * LANES)
    pointer = builder.inttoptr(address, wide.as_pointer())
    call(builder, "llvm.masked.store.v32i16.p0", VOID, [doubled, pointer, i32(1), mask])


def _store_codes(dtype: str) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what stores a token's K and V in eight bits, with a scale each.

    `places`: as for `store_bfloat16`, and behind them the addresses of the scales of K and V.
    """

    def emit(
        builder: Builder, key: Value, value: Value, dim: Value, value_dim: Value, places: Value
    ) -> None:
        key_at, value_at, key_scale, value_scale = (
            load(builder, offset(builder, places, 8 * i), I64) for i in range(4)
        )
        key_inverse = row_scale(builder, dtype, key, dim, key_scale)
        value_inverse = row_scale(builder, dtype, value, value_dim, value_scale)

        def codes_of(row: Value, first: Value, inverse: Value) -> Value:
            x = load(builder, offset(builder, row, builder.shl(first, i64(2))), F32X)
            return row_codes(builder, dtype, x, inverse)

        def of_key(first: Value) -> None:
            codes = codes_of(key, first, key_inverse)
            pairs = builder.bitcast(codes, ir.VectorType(I16, LANES // 2))
            _strided(builder, pairs, offset(builder, key_at, builder.shl(first, i64(4))), 32)

        def of_value(first: Value) -> None:
            codes = codes_of(value, first, value_inverse)
            _strided(builder, codes, offset(builder, value_at, builder.shl(first, i64(1))), 2)

        _vectors(builder, dim, of_key)
        _vectors(builder, value_dim, of_value)

    emit.__name__ = f"store_{dtype}"
    return emitted(types.void, *[types.int64] * 5)(emit)


STORE_CODES: Final = {dtype: _store_codes(dtype) for dtype in LARGEST}
"""void(key, value, D', V', places) by type of pool."""
