"""The values of a product's input rows, and the formats they are written in, as LLVM IR.

A row is made 32 elements at a time, two vectors: their values from the source rows (normalised,
gated or as they are), then the format. What is left of a row whose length is no multiple of 32 goes
through memory filled up with zeros, and so through the same instructions.

    int8       per group of 32: absmax = max |x|, scale = absmax / 127, q = x · 127 / absmax rounded
               to nearest, ties to even; scaled_sum = scale · Σ q; sums = Σ q of the first 16 and
               of the others, int16; begin = BIAS_BITS − 8 · Σ q; 120 in place of 127, and the pair
               sum too, where two products are made of one (`int8_pair_tile`)
    bfloat16   rounded to nearest, ties to even; by one instruction where the set has it, which
               makes subnormal numbers zeros, as its products would
    float32    as it is

Sums of squares run in 32 lanes, element e in lane e mod 32, each in order; then the lanes are added
in halves. Every step is exact or rounded once, so the bits are the same on every instruction set,
but for int8 rows that have 120 steps.

A group that holds an infinity or a NaN gets the scale NaN: everything made of that row shows it. A
group whose absmax is below 2^-100 is taken for zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir
from numba.core import cgutils

from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP
from kernels.cpu.int8_pair_tile import PAIR_OFFSET, PARTNER_OFFSET
from kernels.cpu.int8_weights import BEGINS_OFFSET, BIAS, BIAS_BITS
from kernels.cpu.operands import RowFormat
from kernels.cpu.vector_ir import (
    F32,
    F32X,
    I8X,
    I16,
    I32,
    I32X,
    I64,
    LANES,
    LOG2_E,
    SHORT_POWER_COEFFICIENTS,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    counted_loop,
    exp,
    fast_bf16,
    fma,
    gather,
    i32,
    i64,
    load,
    offset,
    power_of_two,
    store,
    to_bf16,
)

HALF_BYTES: Final = 4 * LANES
GROUP_BYTES: Final = 4 * GROUP
PAIRS_PRODUCTS: Final = selected_instruction_set().pairs_products
LARGEST_INT8: Final = float(PAIR_OFFSET) if PAIRS_PRODUCTS else 127.0
SMALLEST_BITS: Final = 0x0D800000
"""2^-100: LARGEST_INT8 divided by anything above it is finite."""
INFINITE_BITS: Final = 0x7F800000
MAGNITUDE_MASK: Final = 0x7FFFFFFF
HIGHEST_EXPONENT: Final = 88.0
HIGHEST_POWER: Final = 126.0
"""Where exponentials are cut off, in powers of e and of 2: 1 + them has an inverse."""

Pair = tuple[Value, Value]
"""32 elements of a row."""
GroupValues = Callable[[Builder, list[Value], "RowFormat"], Pair]
"""(builder, addresses of 32 elements of each source, what they are written as) → their values."""


def load_pair(builder: Builder, address: Value) -> Pair:
    """Load 32 float32."""
    return load(builder, address, F32X), load(builder, offset(builder, address, HALF_BYTES), F32X)


def groups_of_row(
    builder: Builder, sources: list[Value], k: Value, body: Callable[[Value, list[Value]], None]
) -> None:
    """Emit body(first element, addresses of 32 elements of each source) for all of a row's groups.

    `sources`: addresses of rows of k float32. Where less than a group is left, the addresses are of
    copies filled up with zeros.
    """
    copies = [_buffer(builder, GROUP_BYTES) for _ in sources]

    def group(index: Value) -> None:
        here = [offset(builder, source, builder.mul(index, i64(4))) for source in sources]
        left = builder.sub(k, index)
        is_part = builder.icmp_signed("<", left, i64(GROUP))
        with builder.if_then(is_part, likely=False):
            for source, copy in zip(here, copies, strict=True):
                store(builder, constant(F32X, 0.0), copy)
                store(builder, constant(F32X, 0.0), offset(builder, copy, HALF_BYTES))
                copy_bytes(builder, source, copy, builder.mul(left, i64(4)))
        pairs = zip(here, copies, strict=True)
        body(index, [builder.select(is_part, copy, source) for source, copy in pairs])

    counted_loop(builder, k, group, step=GROUP)


def copy_bytes(builder: Builder, source: Value, target: Value, count: Value) -> None:
    """Copy `count` bytes, one by one: for the ends of rows."""

    def one(index: Value) -> None:
        byte = load(builder, offset(builder, source, index), ir.IntType(8))
        store(builder, byte, offset(builder, target, index))

    counted_loop(builder, count, one)


def inverse_root_mean_square(builder: Builder, row: Value, k: Value, epsilon: Value) -> Value:
    """Return 1 / sqrt(mean(x²) + epsilon) of a row of k float32; float32."""
    totals = [cgutils.alloca_once(builder, F32X) for _ in range(2)]
    for total in totals:
        builder.store(constant(F32X, 0.0), total)

    def add_squares(_: Value, sources: list[Value]) -> None:
        for total, x in zip(totals, load_pair(builder, sources[0]), strict=True):
            builder.store(fma(builder, x, x, builder.load(total)), total)

    groups_of_row(builder, [row], k, add_squares)
    first, second = (builder.load(total) for total in totals)
    total = _add_lanes(builder, builder.fadd(first, second))
    mean = builder.fdiv(total, builder.sitofp(k, F32))
    root = call(builder, "llvm.sqrt.f32", F32, [builder.fadd(mean, epsilon)])
    return builder.fdiv(F32(1.0), root)


def normalised(scale: Value) -> GroupValues:
    """Return the values x · scale · weight; sources: x, weight. `scale`: float32."""

    def values(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
        factor = broadcast(builder, scale)
        x, weight = (load_pair(builder, source) for source in sources)
        first, second = (
            builder.fmul(builder.fmul(a, factor), w) for a, w in zip(x, weight, strict=True)
        )
        return first, second

    return values


def gated(builder: Builder, sources: list[Value], row_format: RowFormat) -> Pair:
    """Return gate / (1 + exp(−gate)) · up; sources: gate, up."""
    gates, ups = (load_pair(builder, source) for source in sources)
    if row_format == RowFormat.BF16:
        first, second = (gate_vector(builder, *pair) for pair in zip(gates, ups, strict=True))
    else:
        first, second = (
            builder.fmul(silu(builder, gate), up) for gate, up in zip(gates, ups, strict=True)
        )
    return first, second


def gate_vector(builder: Builder, gate: Value, up: Value) -> Value:
    """Return silu(gate) · up of one vector, as rows of bfloat16 have it."""
    of_gate = _short_silu if _rounds_by_instruction() else silu
    return builder.fmul(of_gate(builder, gate), up)


def rows_to_bf16(builder: Builder, vector: Value) -> Value:
    """Return a vector rounded as rows of bfloat16 are."""
    return (fast_bf16 if _rounds_by_instruction() else to_bf16)(builder, vector)


def unchanged(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
    """Return the values of the only source."""
    return load_pair(builder, sources[0])


def positive_squares(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
    """Return relu(x)² of the values of the only source; NaN stays."""
    zero = constant(F32X, 0.0)
    kept = (
        builder.select(builder.fcmp_unordered(">", value, zero), value, zero)
        for value in load_pair(builder, sources[0])
    )
    first, second = (builder.fmul(value, value) for value in kept)
    return first, second


def taken_from(row: Value) -> GroupValues:
    """Return the values that stand in a row, float32, at given places; sources: int32 places."""

    def values(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
        places = (load(builder, offset(builder, sources[0], at), I32X) for at in (0, HALF_BYTES))
        first, second = (gather(builder, row, lanes) for lanes in places)
        return first, second

    return values


def silu(builder: Builder, x: Value) -> Value:
    """Return x / (1 + e^−x)."""
    negated = builder.fneg(x)
    highest = constant(F32X, HIGHEST_EXPONENT)
    power = exp(builder, call(builder, "llvm.minnum.v16f32", F32X, [negated, highest]))
    return builder.fdiv(x, builder.fadd(power, constant(F32X, 1.0)))


def _short_silu(builder: Builder, x: Value) -> Value:
    """Return silu within 2^-13 of itself: a fraction of what is lost as bfloat16.

    Those rows are nobody else's to have in the same bits: only sets with bfloat16 products have
    them. A division takes as long as all the rest.
    """
    scaled = builder.fmul(x, constant(F32X, -LOG2_E))
    highest = constant(F32X, HIGHEST_POWER)
    scaled = call(builder, "llvm.minnum.v16f32", F32X, [scaled, highest])
    power = power_of_two(builder, scaled, SHORT_POWER_COEFFICIENTS)
    divisor = builder.fadd(power, constant(F32X, 1.0))
    operands = [divisor, constant(F32X, 0.0), ir.Constant(I16, -1)]
    return builder.fmul(x, call(builder, "llvm.x86.avx512.rcp14.ps.512", F32X, operands))


def _rounds_by_instruction() -> bool:
    """Whether the set has instructions for bfloat16, and so products of such rows."""
    chosen = selected_instruction_set()
    return chosen.has_amx or chosen.has_bf16_dot


def float_outs(out: Value) -> list[Value]:
    """Return the `outs` of a row that is no int8's; `out`: the address of its elements."""
    return [out, *[i64(0)] * 5]


def write_row(
    builder: Builder, values: GroupValues, sources: list[Value], k: Value, row_format: Value,
    outs: list[Value],
) -> None:  # fmt: skip
    """Emit the loop over a row. `row_format`: a RowFormat, int64.

    `outs`: addresses of the row's elements, and of its scales, scaled sums, sums, begins and pair
    sums (int8 only, `float_outs` of others; the last where the set has them).
    """
    place = _buffer(builder, GROUP_BYTES)

    def emit_row(chosen: RowFormat) -> None:
        def group(index: Value, here: list[Value]) -> None:
            pair = values(builder, here, chosen)
            if chosen == RowFormat.INT8:
                _write_int8(builder, pair, index, outs)
            else:
                _write_floats(builder, pair, index, k, outs[0], place, chosen)

        groups_of_row(builder, sources, k, group)

    end = builder.append_basic_block("row.end")
    blocks = {chosen: builder.append_basic_block(f"row.{chosen.name}") for chosen in RowFormat}
    choice = builder.switch(row_format, blocks[RowFormat.INT8])
    for chosen, block in blocks.items():
        if chosen != RowFormat.INT8:
            choice.add_case(i64(chosen), block)
        builder.position_at_end(block)
        emit_row(chosen)
        builder.branch(end)
    builder.position_at_end(end)


def _write_floats(
    builder: Builder, pair: Pair, index: Value, k: Value, out: Value, place: Value,
    chosen: RowFormat,
) -> None:  # fmt: skip
    """Write 32 elements, or those of them that the row has, as float32 or bfloat16."""
    element_bytes = 4 if chosen == RowFormat.FLOAT32 else 2
    target = offset(builder, out, builder.mul(index, i64(element_bytes)))
    left = builder.sub(k, index)
    is_part = builder.icmp_signed("<", left, i64(GROUP))
    at = builder.select(is_part, place, target)
    for half, value in enumerate(pair):
        written = value if chosen == RowFormat.FLOAT32 else rows_to_bf16(builder, value)
        store(builder, written, offset(builder, at, half * LANES * element_bytes))
    with builder.if_then(is_part, likely=False):
        copy_bytes(builder, place, target, builder.mul(left, i64(element_bytes)))


def _write_int8(builder: Builder, pair: Pair, index: Value, outs: list[Value]) -> None:
    """Quantise a group of 32 and write its values, scale, scaled sum and sum."""
    values_at, *beside, begins_at, pair_sums_at = outs
    magnitudes = [
        builder.and_(builder.bitcast(x, I32X), constant(I32X, MAGNITUDE_MASK)) for x in pair
    ]
    # As integers, floats of one sign are in order, and NaN is above infinity.
    largest = call(builder, "llvm.smax.v16i32", I32X, magnitudes)
    bits = call(builder, "llvm.vector.reduce.smax.v16i32", I32, [largest])
    absmax = builder.bitcast(bits, F32)
    is_finite = builder.icmp_signed("<", bits, i32(INFINITE_BITS))
    is_large = builder.icmp_signed(">", bits, i32(SMALLEST_BITS))
    quotient = builder.fdiv(F32(LARGEST_INT8), absmax)
    inverse = builder.select(builder.and_(is_finite, is_large), quotient, F32(0.0))
    scaled = builder.fmul(absmax, F32(1.0 / LARGEST_INT8))
    scale = builder.select(is_finite, scaled, F32(float("nan")))
    # BIAS + v rounds v to an integer, to nearest even, and that stands in the low bits: of a NaN
    # too, where a conversion would be undefined.
    factor, bias = broadcast(builder, inverse), constant(F32X, BIAS)
    rounded = [builder.bitcast(fma(builder, x, factor, bias), I32X) for x in pair]
    integers = [builder.sub(r, constant(I32X, BIAS_BITS)) for r in rounded]
    for half, value in enumerate(integers):
        store(builder, builder.trunc(value, I8X), offset(builder, values_at, index, half * LANES))
    total, halves = _half_sums(builder, *integers)
    scaled_total = builder.fmul(scale, builder.sitofp(total, F32))
    below = builder.lshr(index, i64(3))  # 4 bytes a group of 32
    for value, at in zip((scale, scaled_total, halves), beside, strict=True):
        store(builder, value, offset(builder, at, below))
    taken = builder.mul(total, i32(BEGINS_OFFSET))
    store(builder, builder.sub(i32(BIAS_BITS), taken), offset(builder, begins_at, below))
    if PAIRS_PRODUCTS:
        store(builder, _pair_sum(builder, *integers), offset(builder, pair_sums_at, below))


def _half_sums(builder: Builder, first: Value, second: Value) -> tuple[Value, Value]:
    """Return the sum of 32 numbers, and, as int16 side by side, those of each 16.

    Both are added up at once, one in the upper half of a lane: up to 16 · 127 fits.
    """
    lanes = builder.add(first, builder.shl(second, constant(I32X, 16)))
    both = call(builder, "llvm.vector.reduce.add.v16i32", I32, [lanes])
    sum_of_first = builder.sext(builder.trunc(both, I16), I32)
    # A negative sum below has borrowed one from the upper half.
    upper = builder.sub(both, sum_of_first)
    low = builder.and_(both, i32(0xFFFF))
    total = builder.add(sum_of_first, builder.ashr(upper, i32(16)))
    return total, builder.or_(upper, low)


def _pair_sum(builder: Builder, x: Value, partner: Value) -> Value:
    """Return the sum of x · x' + a · x + b · x' of a group, as `int8_pair_tile` has it."""
    first = builder.mul(x, builder.add(partner, constant(I32X, PAIR_OFFSET)))
    lanes = builder.add(first, builder.mul(partner, constant(I32X, PARTNER_OFFSET)))
    return call(builder, "llvm.vector.reduce.add.v16i32", I32, [lanes])


def _add_lanes(builder: Builder, vector: Value) -> Value:
    """Return the sum of all lanes, added in halves."""
    width = vector.type.count
    while width > 1:
        width //= 2
        halves = []
        for first in (0, width):
            kind = ir.VectorType(I32, width)
            mask = ir.Constant(kind, [i32(first + i) for i in range(width)])
            halves.append(builder.shuffle_vector(vector, vector, mask))
        vector = builder.fadd(*halves)
    return builder.extract_element(vector, i32(0))


def _buffer(builder: Builder, size: int) -> Value:
    """Return the address of `size` bytes on the stack."""
    kind = ir.ArrayType(ir.IntType(8), size)
    return builder.ptrtoint(cgutils.alloca_once(builder, kind), I64)
