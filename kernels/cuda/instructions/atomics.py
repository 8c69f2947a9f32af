"""Additions and exchanges that no other thread's come between.

Of integers only: a sum of floats would depend on the order in which the threads come.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, I64, Emitter, Intrinsic, Value, instruction


def _fetch(operation: str, integer: types.Integer) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        return at.builder.atomic_rmw(operation, at.element(0, 1), at.arguments[2], "monotonic")

    return instruction(integer, [None, None, integer], emit)


def _add(integer: types.Integer) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        at.builder.atomic_rmw("add", at.element(0, 1), at.arguments[2], "monotonic")
        return at.nothing()

    return instruction(types.void, [None, None, integer], emit)


def _add_halves(at: Emitter) -> Value:
    builder = at.builder
    low, high = (
        builder.trunc(half, I32)
        for half in (at.arguments[2], builder.lshr(at.arguments[2], ir.Constant(I64, 32)))
    )
    low_place = builder.bitcast(at.element(0, 1), I32.as_pointer())
    before = builder.atomic_rmw("add", low_place, low, "monotonic")
    carry = builder.zext(builder.icmp_unsigned("<", builder.add(before, low), low), I32)
    high_place = builder.gep(low_place, [ir.Constant(I64, 1)])
    builder.atomic_rmw("add", high_place, builder.add(high, carry), "monotonic")
    return at.nothing()


# add_int32(array, element, value), add_int64(array, element, value): array[element] += value, for
# global or shared memory of that type.
add_int32 = _add(types.int32)
add_int64 = _add(types.int64)

# fetch_add_int64(array, element, value): the same, and gives what the element held before.
# exchange_int64(array, element, value): array[element] = value, and gives what it held before.
fetch_add_int64 = _fetch("add", types.int64)
exchange_int64 = _fetch("xchg", types.int64)

# add_shared_int64(array, element, value): the same for shared memory, which adds 32 bits at a time:
# a 64-bit addition becomes a loop there that tries until nobody came between, and many lanes on one
# element wait for each other. Both halves are added by themselves, the lower one first, whose old
# value tells the carry. Between the two the element is wrong: read it behind a barrier.
add_shared_int64 = instruction(types.void, [None, None, types.int64], _add_halves)
