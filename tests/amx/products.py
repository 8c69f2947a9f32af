"""What the two products of tiles compute, as LLVM IR: rounding, order and all.

Both add rows [M, 4 bytes · K] times columns [K, 4 bytes · N] to a total [M, N] of 32 bits. N is 16
here: a register's columns behind those of its shape are never seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import (
    F32X,
    I32,
    I32X,
    I64,
    LANES,
    VOID,
    Builder,
    Value,
    bf16_high,
    bf16_low,
    broadcast,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    store,
)

ROW_BYTES: Final = 4 * LANES
ROUND_AND_FLUSH: Final = 0x9FC0
"""MXCSR: to nearest, ties to even; subnormal operands and results are zero; nothing is raised."""
llvmlite.binding.initialize_native_asmparser()

Combine = Callable[[Builder, Value, Value, list[Value]], None]


@emitted(types.int64)
def flush_subnormal_numbers(builder: Builder) -> Value:
    """Let float arithmetic from here on take subnormal numbers for zero and make none.

    Returns the MXCSR that was, for `set_mxcsr`: not only a signal's handler comes by here, and who
    calls it otherwise would keep ours.
    """
    place = cgutils.alloca_once(builder, I32)
    _mxcsr(builder, "stmxcsr", place)
    before = builder.zext(builder.load(place), I64)
    builder.store(ir.Constant(I32, ROUND_AND_FLUSH), place)
    _mxcsr(builder, "ldmxcsr", place)
    return before


@emitted(types.void, types.int64)
def set_mxcsr(builder: Builder, value: Value) -> None:
    """Let float arithmetic be again as `flush_subnormal_numbers` found it."""
    place = cgutils.alloca_once(builder, I32)
    builder.store(builder.trunc(value, I32), place)
    _mxcsr(builder, "ldmxcsr", place)


def _mxcsr(builder: Builder, instruction: str, place: Value) -> None:
    kind = ir.FunctionType(VOID, [I64])
    address = builder.ptrtoint(place, I64)
    builder.asm(kind, f"{instruction} ($0)", "r,~{memory}", [address], True)


def _each_row(
    builder: Builder, operands: tuple[Value, ...], depth: Value, chains: int, step: Combine
) -> Callable[[Callable[[Value, list[Value]], Value]], None]:
    """Return what emits the loops: for each row the sums over all of K, then what becomes of them.

    `step(builder, x, y, sums)` adds one 32-bit element of a row, in all lanes, times a row of the
    columns to `chains` sums, which begin as zeros.
    """
    rows, columns, totals, num_rows = operands

    def emit(finish: Callable[[Value, list[Value]], Value]) -> None:
        def row(m: Value) -> None:
            down = builder.mul(m, i64(ROW_BYTES))
            sums = [cgutils.alloca_once(builder, I32X) for _ in range(chains)]
            for total in sums:
                builder.store(constant(I32X, 0), total)

            def element(k: Value) -> None:
                at = offset(builder, rows, down, builder.shl(k, i64(2)))
                x = broadcast(builder, load(builder, at, I32))
                y = load(builder, offset(builder, columns, builder.mul(k, i64(ROW_BYTES))), I32X)
                step(builder, x, y, sums)

            counted_loop(builder, depth, element)
            place = offset(builder, totals, down)
            found = finish(load(builder, place, I32X), [builder.load(total) for total in sums])
            store(builder, found, place)

        counted_loop(builder, num_rows, row)

    return emit


@emitted(types.void, *[types.int64] * 5)
def multiply_bf16(
    builder: Builder, rows: Value, columns: Value, totals: Value, num_rows: Value, depth: Value
) -> None:
    """Do what TDPBF16PS does.

    The first numbers of all pairs are one chain of fused multiply-adds, the second ones another;
    both begin at zero. Then they are added, and the result to the total: three roundings more.
    """

    def step(builder: Builder, x: Value, y: Value, sums: list[Value]) -> None:
        for half, total in zip((bf16_low, bf16_high), sums, strict=True):
            before = builder.bitcast(builder.load(total), F32X)
            after = fma(builder, half(builder, x), half(builder, y), before)
            builder.store(builder.bitcast(after, I32X), total)

    def finish(total: Value, sums: list[Value]) -> Value:
        first, second = (builder.bitcast(value, F32X) for value in sums)
        whole = builder.fadd(builder.bitcast(total, F32X), builder.fadd(first, second))
        return builder.bitcast(whole, I32X)

    _each_row(builder, (rows, columns, totals, num_rows), depth, 2, step)(finish)


@emitted(types.void, *[types.int64] * 5)
def multiply_int8(
    builder: Builder, rows: Value, columns: Value, totals: Value, num_rows: Value, depth: Value
) -> None:
    """Do what TDPBSSD does: signed bytes, four of each element, summed modulo 2^32."""

    def step(builder: Builder, x: Value, y: Value, sums: list[Value]) -> None:
        found = builder.load(sums[0])
        for byte in range(4):
            left, right = constant(I32X, 24 - 8 * byte), constant(I32X, 24)
            a, b = (builder.ashr(builder.shl(v, left), right) for v in (x, y))
            found = builder.add(found, builder.mul(a, b))
        builder.store(found, sums[0])

    def finish(total: Value, sums: list[Value]) -> Value:
        return builder.add(total, sums[0])

    _each_row(builder, (rows, columns, totals, num_rows), depth, 1, step)(finish)
