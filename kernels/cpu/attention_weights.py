"""From scores to weights: a softmax that goes through the context in super-blocks.

A row has a maximum m, the sum of its weights 2^(s − m) in 16 lanes, and its results, the weighted
V. Scores come in powers of 2. (Milakov and Gimelshein 2018, online softmax.)

m is a reference, not a result: it is raised only when a score exceeds it by more than RAISE_ABOVE,
so most super-blocks rescale nothing, and no weight exceeds 2^8. Whether it is raised is decided
once a super-block, from the row's own scores.

Scores may have a cap (Gemma 2; `capped_values`), in powers of 2 as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types

from kernels.cpu.attention_places import VECTOR_BYTES, Place, place
from kernels.cpu.attention_sizes import SUB_BLOCKS
from kernels.cpu.capped_values import capped
from kernels.cpu.emitted import Emitter, emitted
from kernels.cpu.vector_ir import (
    F32,
    F32X,
    I32,
    I32X,
    I64,
    LANES,
    POWER_COEFFICIENTS,
    SHORT_POWER_COEFFICIENTS,
    Builder,
    Value,
    broadcast,
    constant,
    counted_loop,
    fast_bf16,
    fma,
    i32,
    i64,
    load,
    offset,
    power_of_two,
    store,
)

HIGHEST_POWER: Final = 100.0
"""Of a score above all others: sums of weights with it are finite."""
RAISE_ABOVE: Final = 8.0
"""A row's maximum is raised when a score exceeds it by more: weights stay below 2^8."""


def row_weights(weights_of_row: Emitter) -> Any:  # noqa: ANN401 - Numba's objects
    """Return it callable from compiled code."""
    return emitted(types.void, *[types.int64] * 9)(weights_of_row)


def weights_of_row(*, to_pairs: bool, scaled: bool) -> Emitter:
    """Return an emitter, of the weights of one row.

    scores: float32 [64], in powers of 2. positions: int32 [64] of the super-block's tokens;
    sees_all: whether the row sees all of them, and not those from its FIRST to below its LIMIT.
    state: the row's (`STATE_BYTES` in `kernels.cpu.attention_sizes`). out: float32 [D'], the
    results so far. weights: [64], float32, or bfloat16 where `to_pairs`; 0 for tokens the row does
    not see. cap: the bits of a float32, that of the scores; 0: they have none. `scaled`: pools of
    eight bits; scores are multiplied by K's scales, and weights, but not their sum, by V's.
    between: emits what is done beside it, once for each of 4 vectors of scores; then the row sees
    all, whatever sees_all says.
    """
    coefficients = SHORT_POWER_COEFFICIENTS if to_pairs else POWER_COEFFICIENTS

    def emit(
        builder: Builder, scores: Value, positions: Value, sees_all: Value, state: Value,
        out: Value, dim: Value, places: Value, weights: Value, cap: Value,
        between: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        def masks() -> list[Value]:
            limit, first = (load(builder, offset(builder, state, at), I64, 8) for at in (8, 16))
            size = broadcast(builder, builder.trunc(builder.sub(limit, first), I32))
            first = broadcast(builder, builder.trunc(first, I32))
            vectors = (
                load(builder, offset(builder, positions, VECTOR_BYTES * j), I32X, VECTOR_BYTES)
                for j in range(SUB_BLOCKS)
            )
            # Those before the first become large numbers.
            return [
                builder.icmp_unsigned("<", builder.sub(vector, first), size) for vector in vectors
            ]

        def body(seen: list[Value] | None) -> None:
            lanes = []
            for j in range(SUB_BLOCKS):
                at = offset(builder, scores, VECTOR_BYTES * j)
                x = load(builder, at, F32X, VECTOR_BYTES)
                if scaled:
                    x = builder.fmul(x, _scales(builder, places, Place.KEY_SCALES, j))
                lanes.append(x)
            lanes = _capped(builder, lanes, cap)
            if seen is not None:
                below = constant(F32X, float("-inf"))
                lanes = [
                    builder.select(is_seen, x, below)
                    for is_seen, x in zip(seen, lanes, strict=True)
                ]
            top = _raise_maximum(builder, lanes, state, out, dim, coefficients)
            sums_at = offset(builder, state, VECTOR_BYTES)
            sums = load(builder, sums_at, F32X, VECTOR_BYTES)
            for j in range(SUB_BLOCKS):
                p = power_of_two(builder, builder.fsub(lanes[j], top), coefficients)
                if seen is not None:
                    p = builder.select(seen[j], p, constant(F32X, 0.0))
                sums = builder.fadd(sums, p)
                if scaled:
                    p = builder.fmul(p, _scales(builder, places, Place.VALUE_SCALES, j))
                    if seen is not None:
                        p = builder.select(seen[j], p, constant(F32X, 0.0))
                if to_pairs:
                    store(builder, fast_bf16(builder, p), offset(builder, weights, 32 * j), 32)
                else:
                    store(builder, p, offset(builder, weights, VECTOR_BYTES * j), VECTOR_BYTES)
                if between is not None:
                    between()
            store(builder, sums, sums_at, VECTOR_BYTES)

        if between is not None:
            body(None)
            return

        is_full = builder.icmp_signed("!=", sees_all, i64(0))
        with builder.if_else(is_full, likely=True) as (whole, part):
            with whole:
                body(None)
            with part:
                body(masks())

    emit.__name__ = f"row_weights_{to_pairs}_{scaled}".lower()
    return emit


def _capped(builder: Builder, lanes: Sequence[Value], cap: Value) -> list[Value]:
    """Return scores with their cap, where there is one."""
    without = builder.block
    with builder.if_then(builder.icmp_signed("!=", cap, i64(0)), likely=False):
        values = capped(builder, builder.bitcast(builder.trunc(cap, I32), F32), list(lanes))
        inside = builder.block
    found = []
    for x, value in zip(lanes, values, strict=True):
        phi = builder.phi(F32X)
        phi.add_incoming(x, without)
        phi.add_incoming(value, inside)
        found.append(phi)
    return found


def _raise_maximum(
    builder: Builder, lanes: Sequence[Value], state: Value, out: Value, dim: Value,
    coefficients: Sequence[float],
) -> Value:  # fmt: skip
    """Raise a row's maximum if a score exceeds it by far; return it in all lanes."""
    largest = _largest(builder, lanes)
    before = load(builder, state, F32)
    bound = builder.fadd(before, ir.Constant(F32, RAISE_ABOVE))
    with builder.if_then(builder.fcmp_ordered(">", largest, bound), likely=False):
        difference = broadcast(builder, builder.fsub(before, largest))
        factor = power_of_two(builder, difference, coefficients)
        rescale(builder, offset(builder, state, VECTOR_BYTES), i64(LANES), factor)
        rescale(builder, out, dim, factor)
        store(builder, largest, state)
    return broadcast(builder, load(builder, state, F32))


def _scales(builder: Builder, places: Value, field: Place, index: int) -> Value:
    return load(builder, place(builder, places, field, index), F32X, VECTOR_BYTES)


def _largest(builder: Builder, lanes: Sequence[Value]) -> Value:
    """Return the largest of the lanes of vectors, as a scalar; where there is a NaN, anything."""
    top = lanes[0]
    for vector in lanes[1:]:
        top = builder.select(builder.fcmp_ordered("<", top, vector), vector, top)
    for width in (8, 4, 2, 1):
        upper = upper_lanes(builder, top, width)
        top = builder.select(builder.fcmp_ordered("<", top, upper), upper, top)
    return builder.extract_element(top, i32(0))


def upper_lanes(builder: Builder, x: Value, width: int) -> Value:
    """Return `x` with lanes width to 2·width − 1 moved to the front."""
    order = [i + width if i < width else i for i in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(I32X, order))


def rescale(builder: Builder, address: Value, count: Value, factor: Value) -> None:
    """Multiply float32 [count], whole vectors, by the lanes of `factor`."""

    def body(first: Value) -> None:
        at = offset(builder, address, builder.shl(first, i64(2)))
        store(
            builder, builder.fmul(load(builder, at, F32X, VECTOR_BYTES), factor), at, VECTOR_BYTES
        )

    counted_loop(builder, count, body, LANES)


@emitted(types.float32, types.int64)
def sum_lanes(builder: Builder, address: Value) -> Value:
    """Return the sum of 16 float32, halves added to halves: in one order everywhere."""
    x = load(builder, address, F32X, VECTOR_BYTES)
    for width in (8, 4, 2, 1):
        x = builder.fadd(x, upper_lanes(builder, x, width))
    return builder.extract_element(x, i32(0))


@emitted(types.float32, types.float32, types.float32)
def weight_of_score(builder: Builder, score: Value, top: Value) -> Value:
    """Return 2^(score − top), or 2^HIGHEST_POWER, beside which all other weights are nothing."""
    x = broadcast(builder, builder.fsub(score, top))
    highest = constant(F32X, HIGHEST_POWER)
    x = builder.select(builder.fcmp_ordered(">", x, highest), highest, x)
    return builder.extract_element(power_of_two(builder, x), i32(0))


@emitted(types.void, types.float32, types.float32, *[types.int64] * 4)
def fold(
    builder: Builder, top: Value, total: Value, x: Value, dim: Value, sums: Value, out: Value
) -> None:
    """Add a segment's result to that of the segments before it.

    top, total, x: maximum, sum of weights and weighted V, float32 [D'], of the segment. sums: the
    same two numbers of those before, out: their weighted V; both are replaced.
    """
    before, weight = (load(builder, offset(builder, sums, i), F32) for i in (0, 4))
    is_new = builder.fcmp_ordered(">", top, before)
    highest = builder.select(is_new, top, before)
    old, new = (
        power_of_two(builder, broadcast(builder, builder.fsub(m, highest))) for m in (before, top)
    )
    scaled = builder.fmul(broadcast(builder, weight), old)
    weights = fma(builder, broadcast(builder, total), new, scaled)
    store(builder, highest, sums)
    store(builder, builder.extract_element(weights, i32(0)), offset(builder, sums, 4))

    def body(first: Value) -> None:
        at = builder.shl(first, i64(2))
        here = offset(builder, out, at)
        down = builder.fmul(load(builder, here, F32X, VECTOR_BYTES), old)
        more = load(builder, offset(builder, x, at), F32X, VECTOR_BYTES)
        store(builder, fma(builder, more, new, down), here, VECTOR_BYTES)

    counted_loop(builder, dim, body, LANES)
