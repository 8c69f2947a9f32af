"""Additions that no other thread's come between.

Of integers only: a sum of floats would depend on the order in which the threads come.
"""

from __future__ import annotations

from numba.cuda import types

from kernels.cuda.instructions.emit import Emitter, Intrinsic, Value, instruction


def _add(integer: types.Integer) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        at.builder.atomic_rmw("add", at.element(0, 1), at.arguments[2], "monotonic")
        return at.nothing()

    return instruction(types.void, [None, None, integer], emit)


# add_int32(array, element, value), add_int64(array, element, value): array[element] += value, for
# global or shared memory of that type.
add_int32 = _add(types.int32)
add_int64 = _add(types.int64)
