"""Tokens through the memory of Gated DeltaNet's heads, as LLVM IR.

    recalled, seen = Sᵀ k, Sᵀ q              both of one pass over the memory as it was before
    δ              = β · (v − α · recalled)
    o              = α · seen + (k·q) · δ    which is what q finds in the memory behind the token
    S              = α · S + k ⊗ δ           in one pass with the sums of the next token

Columns of a memory do not know of each other: tokens go through 32 of them while these are in the
first-level cache. A sum runs down the column, each term rounded once; lanes are columns. So its
bits depend on the memory and the token alone, wherever a row begins, on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types
from numba.core import cgutils

from kernels.cpu.delta_net_sizes import COLUMNS, SUB_BLOCK
from kernels.cpu.emitted import emitted
from kernels.cpu.row_values import inverse_root_mean_square, load_pair, silu
from kernels.cpu.sigmoids import sigmoid, softplus
from kernels.cpu.vector_ir import (
    EXP_LOWEST,
    F32,
    F32X,
    I32,
    LANES,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    counted_loop,
    exp,
    fma,
    i64,
    load,
    offset,
    store,
)
from kernels.reference.delta_net import LENGTH_EPSILON

PAIR_BYTES: Final = 4 * COLUMNS
HALF_BYTES: Final = 4 * LANES
ROWS_AT_ONCE: Final = 4
"""Rows of a memory whose instructions stand one behind the other; Dk is a multiple."""


@emitted(types.float32, types.int64, types.int64)
def shorten(builder: Builder, query: Value, dim: Value) -> Value:
    """Give a query and the key behind it their lengths, 1/√Dk and 1; return their product.

    1 / |x| = 1 / √Dk · 1 / √(mean(x²) + ε/Dk).
    """
    key = offset(builder, query, builder.shl(dim, i64(2)))
    size = builder.sitofp(dim, F32)
    epsilon = builder.fdiv(F32(float(LENGTH_EPSILON)), size)
    inverse = builder.fdiv(F32(1.0), size)
    root = call(builder, "llvm.sqrt.f32", F32, [inverse])
    factors = [
        broadcast(builder, builder.fmul(factor, inverse_root_mean_square(builder, x, dim, epsilon)))
        for x, factor in ((query, inverse), (key, root))
    ]
    totals = [cgutils.alloca_once(builder, F32X) for _ in range(2)]
    for total in totals:
        builder.store(constant(F32X, 0.0), total)

    def some(index: Value) -> None:
        at = builder.shl(index, i64(2))
        for half, total in enumerate(totals):
            added = builder.load(total)
            places = [offset(builder, x, at, HALF_BYTES * half) for x in (query, key)]
            q, k = (
                builder.fmul(load(builder, place, F32X), factor)
                for place, factor in zip(places, factors, strict=True)
            )
            builder.store(fma(builder, q, k, added), total)
            for value, place in zip((q, k), places, strict=True):
                store(builder, value, place)

    counted_loop(builder, dim, some, step=2 * LANES)
    first, second = (builder.load(total) for total in totals)
    lanes = builder.fadd(first, second)
    return call(builder, "llvm.vector.reduce.fadd.v16f32", F32, [F32(0.0), lanes])


@emitted(types.void, types.int64, types.float32, types.float32, types.int64)
def step_sizes(
    builder: Builder, factors: Value, rate: Value, time_bias: Value, num_tokens: Value
) -> None:
    """Replace a head's b and a, float32 [2, SUB_BLOCK], by β and α."""

    def some(index: Value) -> None:
        place = offset(builder, factors, builder.shl(index, i64(2)))
        store(builder, sigmoid(builder, load(builder, place, F32X)), place)
        place = offset(builder, place, 4 * SUB_BLOCK)
        moved = builder.fadd(load(builder, place, F32X), broadcast(builder, time_bias))
        exponent = builder.fmul(softplus(builder, moved), broadcast(builder, rate))
        store(builder, decay(builder, exponent), place)

    counted_loop(builder, num_tokens, some, step=LANES)


def decay(builder: Builder, x: Value) -> Value:
    """Return e^x of numbers up to 0: below −87 it is 0, and NaN of NaN."""
    is_small = builder.fcmp_ordered("<", x, constant(F32X, EXP_LOWEST))
    power = builder.select(is_small, constant(F32X, 0.0), exp(builder, x))
    return builder.select(builder.fcmp_unordered("uno", x, x), x, power)


@emitted(types.void, *[types.int64] * 9)
def remember(
    builder: Builder,
    memory: Value,
    queries: Value,
    values: Value,
    row_bytes: Value,
    dim: Value,
    num_tokens: Value,
    factors: Value,
    out: Value,
    out_row_bytes: Value,
) -> None:
    """Bring a sub-block's tokens through 32 columns of a memory, float32 [Dk, 32].

    `queries`: a token's query, its key behind it; `values`: the columns' of its value; a token's
    are `row_bytes` behind the one's before. `factors`: float32 [NUM_FACTORS, SUB_BLOCK], β, α, k·q.
    `out`: the columns' place in the first token's row.
    """
    changes, recalled, seen = (_pair_of_variables(builder) for _ in range(3))
    key_offset = builder.shl(dim, i64(2))

    def read(row: Value) -> None:
        """Sum up what a token finds in the memory as it lies."""
        _clear(builder, recalled, seen)

        def body(column: Value, at: Value) -> None:
            query = offset(builder, row, column)
            state = load_pair(builder, at)
            _add_found(builder, state, query, key_offset, recalled, seen)

        _memory_rows(builder, memory, dim, body)

    def change(row: Value, index: Value) -> None:
        """Find out what a token changes, and write what comes out."""
        beta, alpha, product = (
            broadcast(builder, load(builder, _factor(builder, factors, index, i), F32, 4))
            for i in range(3)
        )
        value = load_pair(builder, offset(builder, values, builder.mul(index, row_bytes)))
        target = offset(builder, out, builder.mul(index, out_row_bytes))
        for half in range(2):
            old, found = builder.load(recalled[half]), builder.load(seen[half])
            rest = fma(builder, builder.fneg(alpha), old, value[half])
            delta = builder.fmul(beta, rest)
            builder.store(delta, changes[half])
            result = fma(builder, product, delta, builder.fmul(alpha, found))
            store(builder, result, offset(builder, target, HALF_BYTES * half))

    def update(row: Value, index: Value, following: Value | None) -> None:
        """Change the memory by a token; sum up what the following one finds in it."""
        alpha = broadcast(builder, load(builder, _factor(builder, factors, index, 1), F32, 4))
        deltas = [builder.load(change) for change in changes]
        if following is not None:
            _clear(builder, recalled, seen)

        def body(column: Value, at: Value) -> None:
            key = broadcast(builder, load(builder, offset(builder, row, key_offset, column), F32))
            state = [
                fma(builder, key, delta, builder.fmul(old, alpha))
                for old, delta in zip(load_pair(builder, at), deltas, strict=True)
            ]
            if following is not None:
                query = offset(builder, following, column)
                _add_found(builder, (state[0], state[1]), query, key_offset, recalled, seen)
            for half, changed in enumerate(state):
                store(builder, changed, offset(builder, at, HALF_BYTES * half))

        _memory_rows(builder, memory, dim, body)

    last = builder.sub(num_tokens, i64(1))

    def token(index: Value) -> None:
        row = offset(builder, queries, builder.mul(index, row_bytes))
        change(row, index)
        update(row, index, offset(builder, row, row_bytes))

    read(queries)
    counted_loop(builder, last, token)
    row = offset(builder, queries, builder.mul(last, row_bytes))
    change(row, last)
    update(row, last, None)


Variables = tuple[Value, Value]


def _pair_of_variables(builder: Builder) -> Variables:
    return cgutils.alloca_once(builder, F32X), cgutils.alloca_once(builder, F32X)


def _clear(builder: Builder, *pairs: Variables) -> None:
    for pair in pairs:
        for variable in pair:
            builder.store(constant(F32X, 0.0), variable)


def _add_found(
    builder: Builder, state: tuple[Value, Value], query: Value, key_offset: Value,
    recalled: Variables, seen: Variables,
) -> None:  # fmt: skip
    """Add a row of the memory times an element of key and query to the sums."""
    for at, sums in ((offset(builder, query, key_offset), recalled), (query, seen)):
        factor = broadcast(builder, load(builder, at, F32, 4))
        for old, variable in zip(state, sums, strict=True):
            builder.store(fma(builder, factor, old, builder.load(variable)), variable)


def _memory_rows(
    builder: Builder, memory: Value, dim: Value, body: Callable[[Value, Value], None]
) -> None:
    """Emit body(bytes from a key's first element to its own, address) for each row of a memory."""

    def rows(first: Value) -> None:
        for i in range(ROWS_AT_ONCE):
            index = builder.add(first, i64(i))
            at = offset(builder, memory, builder.mul(index, i64(PAIR_BYTES)))
            body(builder.shl(index, i64(2)), at)

    counted_loop(builder, dim, rows, step=ROWS_AT_ONCE)


def _factor(builder: Builder, factors: Value, index: Value, number: int) -> Value:
    return offset(builder, factors, builder.shl(index, i64(2)), 4 * SUB_BLOCK * number)


@emitted(types.void, *[types.int64] * 6)
def gated_norm(
    builder: Builder, x: Value, gates: Value, weight: Value, epsilon: Value, dim: Value, out: Value
) -> None:
    """Write rms_norm(x) · weight · silu(gates), float32 [dim]. `epsilon`: the bits of a float32."""
    bits = builder.bitcast(builder.trunc(epsilon, I32), F32)
    factor = broadcast(builder, inverse_root_mean_square(builder, x, dim, bits))

    def some(index: Value) -> None:
        at = builder.shl(index, i64(2))
        normed = load_pair(builder, offset(builder, x, at))
        weights = load_pair(builder, offset(builder, weight, at))
        for half in range(2):
            value = builder.fmul(builder.fmul(normed[half], factor), weights[half])
            gate = load(builder, offset(builder, gates, at, HALF_BYTES * half), F32X)
            value = builder.fmul(value, silu(builder, gate))
            store(builder, value, offset(builder, out, at, HALF_BYTES * half))

    counted_loop(builder, dim, some, step=2 * LANES)
