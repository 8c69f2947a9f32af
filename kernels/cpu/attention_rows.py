"""Rows of attention: the words of their states, and numbers on their way in and out."""

from __future__ import annotations

from typing import Final

from llvmlite import ir
from numba import types

from kernels.cpu.attention_places import (
    VECTOR_BYTES,
)
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import (
    F32X,
    I32,
    I32X,
    LANES,
    VOID,
    Builder,
    Value,
    broadcast,
    call,
    constant,
    counted_loop,
    i32,
    i64,
    load,
    offset,
    store,
    to_bf16,
)

LIMIT: Final = 1
"""Word of a row's state: it sees positions below."""
FIRST: Final = 2
"""Word of a row's state: and none before this one."""
PARTIAL_SUMS_AT: Final = 64


@emitted(types.void, *[types.int64] * 2)
def set_zero(builder: Builder, address: Value, count: Value) -> None:
    """Set float32 [count], whole vectors, to zero."""

    def body(first: Value) -> None:
        at = offset(builder, address, builder.shl(first, i64(2)))
        store(builder, constant(F32X, 0.0), at, VECTOR_BYTES)

    counted_loop(builder, count, body, LANES)


@emitted(types.void, *[types.int64] * 3)
def round_row(builder: Builder, x: Value, dim: Value, out: Value) -> None:
    """Write float32 x [D'] as bfloat16 to `out`."""

    def body(first: Value) -> None:
        row = load(builder, offset(builder, x, builder.shl(first, i64(2))), F32X)
        store(builder, to_bf16(builder, row), offset(builder, out, builder.shl(first, i64(1))))

    counted_loop(builder, dim, body, LANES)


@emitted(types.void, *[types.int64] * 4, types.float32)
def write_result(
    builder: Builder, x: Value, dim: Value, padded: Value, out: Value, total: Value
) -> None:
    """Write x / total, float32 [D] of x [D'], to `out`; subnormal results become +0.

    Tile registers take subnormal numbers for 0 whenever something is added to them, be it 0.
    """
    divisor = broadcast(builder, total)
    smallest = constant(F32X, 2.0**-126)

    def quotient(first: Value) -> Value:
        row = load(builder, offset(builder, x, builder.shl(first, i64(2))), F32X, VECTOR_BYTES)
        size = call(builder, "llvm.fabs.v16f32", F32X, [row])
        is_zero = builder.fcmp_ordered("<", size, smallest)
        row = builder.select(is_zero, constant(F32X, 0.0), row)
        return builder.fdiv(row, divisor)

    whole = builder.and_(dim, i64(-LANES))

    def body(first: Value) -> None:
        store(builder, quotient(first), offset(builder, out, builder.shl(first, i64(2))))

    counted_loop(builder, whole, body, LANES)
    with builder.if_then(builder.icmp_signed("!=", whole, padded), likely=False):
        rest = broadcast(builder, builder.trunc(builder.sub(dim, whole), I32))
        mask = builder.icmp_signed("<", ir.Constant(I32X, list(range(LANES))), rest)
        pointer = builder.inttoptr(
            offset(builder, out, builder.shl(whole, i64(2))), F32X.as_pointer()
        )
        operands = [quotient(whole), pointer, i32(1), mask]
        call(builder, "llvm.masked.store.v16f32.p0", VOID, operands)
