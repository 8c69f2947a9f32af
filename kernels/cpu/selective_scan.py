"""Tokens through the memory of Mamba-2's heads, as LLVM IR; `kernels.reference.mamba2`.

    S = α · S + b ⊗ Δ · x      y = Sᵀ c + D · x      out = y · silu(z)

Columns of a memory do not know of each other: tokens go through 32 of them, 16 where no more are
left (heads of 80), while these are in the first-level cache, some rows at a time, which are in
registers from a sub-block's first token to its last. A sum runs down the column, each term rounded
once; lanes are columns. So its bits depend on the memory and the token alone, wherever a row
begins, on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from numba import types
from numba.core import cgutils

from kernels.cpu.delta_rule import decay
from kernels.cpu.emitted import emitted
from kernels.cpu.mamba2_sizes import COLUMNS, LAST_COLUMNS, SUB_BLOCK
from kernels.cpu.row_values import silu
from kernels.cpu.sigmoids import softplus
from kernels.cpu.vector_ir import (
    F32,
    F32X,
    LANES,
    Builder,
    Value,
    broadcast,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    store,
)

HALF_BYTES: Final = 4 * LANES
ROWS_AT_ONCE: Final = 4
"""Rows of a memory that stay in registers; N is a multiple."""


@emitted(types.void, types.int64, types.float32, types.float32, types.int64)
def time_steps(
    builder: Builder, factors: Value, rate: Value, time_bias: Value, num_tokens: Value
) -> None:
    """Replace a head's d, the first half of float32 [2, SUB_BLOCK], by Δ, and write α behind."""

    def some(index: Value) -> None:
        place = offset(builder, factors, builder.shl(index, i64(2)))
        moved = builder.fadd(load(builder, place, F32X), broadcast(builder, time_bias))
        time = softplus(builder, moved)
        store(builder, time, place)
        exponent = builder.fmul(time, broadcast(builder, rate))
        store(builder, decay(builder, exponent), offset(builder, place, 4 * SUB_BLOCK))

    counted_loop(builder, num_tokens, some, step=LANES)


def _make_scan(columns: int) -> Callable[..., None]:
    """Return scan, for a block of so many columns, 32 or 16."""
    halves, row_of_memory = columns // LANES, 4 * columns

    @emitted(types.void, *[types.int64] * 10)
    def scan(
        builder: Builder,
        memory: Value,
        x: Value,
        b: Value,
        c_offset: Value,
        row_bytes: Value,
        size: Value,
        num_tokens: Value,
        factors: Value,
        steps: Value,
        sums: Value,
    ) -> None:
        """Bring a sub-block's tokens through a block of columns of a memory, float32 [N, columns].

        `x`: the columns' place in the first token's row, `b`: that of its b, with c `c_offset`
        bytes behind it; a token's are `row_bytes` behind the one's before. `factors`: float32
        [2, SUB_BLOCK], Δ, α. `steps`, `sums`: float32 [SUB_BLOCK, columns], where Δ · x and Sᵀ c
        go.
        """

        def start(index: Value) -> None:
            time = broadcast(builder, _factor(builder, factors, index, 0))
            values = _loaded(builder, offset(builder, x, builder.mul(index, row_bytes)), halves)
            at = builder.mul(index, i64(row_of_memory))
            for half, value in enumerate(values):
                step = offset(builder, steps, at, HALF_BYTES * half)
                store(builder, builder.fmul(time, value), step)
                store(builder, constant(F32X, 0.0), offset(builder, sums, at, HALF_BYTES * half))

        counted_loop(builder, num_tokens, start)
        state = [cgutils.alloca_once(builder, F32X) for _ in range(halves * ROWS_AT_ONCE)]

        def rows(first: Value) -> None:
            place = offset(builder, memory, builder.mul(first, i64(row_of_memory)))
            for number, variable in enumerate(state):
                builder.store(
                    load(builder, offset(builder, place, HALF_BYTES * number), F32X), variable
                )
            first_b = offset(builder, b, builder.shl(first, i64(2)))

            def token(index: Value) -> None:
                alpha = broadcast(builder, _factor(builder, factors, index, 1))
                token_b = offset(builder, first_b, builder.mul(index, row_bytes))
                token_c = offset(builder, token_b, c_offset)
                at = builder.mul(index, i64(row_of_memory))
                step = _loaded(builder, offset(builder, steps, at), halves)
                total = _loaded(builder, offset(builder, sums, at), halves)
                for row in range(ROWS_AT_ONCE):
                    key, query = (
                        broadcast(builder, load(builder, offset(builder, of, 4 * row), F32, 4))
                        for of in (token_b, token_c)
                    )
                    for half in range(halves):
                        variable = state[halves * row + half]
                        old = builder.fmul(builder.load(variable), alpha)
                        new = fma(builder, key, step[half], old)
                        builder.store(new, variable)
                        total[half] = fma(builder, query, new, total[half])
                for half, value in enumerate(total):
                    store(builder, value, offset(builder, sums, at, HALF_BYTES * half))

            counted_loop(builder, num_tokens, token)
            for number, variable in enumerate(state):
                target = offset(builder, place, HALF_BYTES * number)
                store(builder, builder.load(variable), target)

        counted_loop(builder, size, rows, step=ROWS_AT_ONCE)

    made: Callable[..., None] = scan
    return made


def _make_finish(columns: int) -> Callable[..., None]:
    """Return finish, for a block of so many columns."""
    halves = columns // LANES

    @emitted(types.void, *[types.int64] * 6, types.float32, types.int64)
    def finish(
        builder: Builder,
        sums: Value,
        x: Value,
        z: Value,
        row_bytes: Value,
        out: Value,
        out_row_bytes: Value,
        skip: Value,
        num_tokens: Value,
    ) -> None:
        """Write (Sᵀ c + D · x) · silu(z) of a sub-block's tokens, a block of columns.

        `sums`: as above. `x`, `z`, `out`: the columns' places in the first token's rows.
        """

        def token(index: Value) -> None:
            by = builder.mul(index, row_bytes)
            place = offset(builder, sums, builder.mul(index, i64(4 * columns)))
            total = _loaded(builder, place, halves)
            values, gates = (_loaded(builder, offset(builder, of, by), halves) for of in (x, z))
            target = offset(builder, out, builder.mul(index, out_row_bytes))
            factor = broadcast(builder, skip)
            for half in range(halves):
                y = fma(builder, factor, values[half], total[half])
                y = builder.fmul(y, silu(builder, gates[half]))
                store(builder, y, offset(builder, target, HALF_BYTES * half))

        counted_loop(builder, num_tokens, token)

    made: Callable[..., None] = finish
    return made


scan, finish = _make_scan(COLUMNS), _make_finish(COLUMNS)
scan_last, finish_last = _make_scan(LAST_COLUMNS), _make_finish(LAST_COLUMNS)


def _loaded(builder: Builder, address: Value, halves: int) -> list[Value]:
    """Load 16 float32, or twice as many."""
    return [
        load(builder, offset(builder, address, HALF_BYTES * half), F32X) for half in range(halves)
    ]


def _factor(builder: Builder, factors: Value, index: Value, number: int) -> Value:
    place = offset(builder, factors, builder.shl(index, i64(2)), 4 * SUB_BLOCK * number)
    return load(builder, place, F32, 4)
