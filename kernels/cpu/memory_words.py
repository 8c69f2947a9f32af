"""Items of memory at addresses, read, written and copied by compiled code.

Functions that reckon with floats around them are compiled `unfused`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from llvmlite import ir
from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.kernel_target import kernel_function
from kernels.cpu.vector_ir import F32, I8, I32, VOID, Builder, Value, call, i64, load, offset, store

I1: Final = ir.IntType(1)

Function = TypeVar("Function", bound=Callable[..., object])


def unfused(function: Function) -> Function:
    """Compile a function that operations call, every float operation rounded by itself."""
    compiled: Function = kernel_function(function, frozenset())
    return compiled


def _reader(kind: types.Type, stored: ir.Type, size: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what reads item `index` of the items at an address."""

    def read(builder: Builder, address: Value, index: Value) -> Value:
        return load(builder, offset(builder, address, builder.mul(index, i64(size))), stored, size)

    return emitted(kind, types.int64, types.int64)(read)


def _writer(kind: types.Type, size: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what writes item `index` of the items at an address."""

    def write(builder: Builder, address: Value, index: Value, value: Value) -> None:
        store(builder, value, offset(builder, address, builder.mul(index, i64(size))), size)

    return emitted(types.void, types.int64, types.int64, kind)(write)


# Not arrays: their descriptors and their checks of negative indices take long to compile.
read_float64 = _reader(types.float64, ir.DoubleType(), 8)
read_float32 = _reader(types.float32, F32, 4)
read_int32 = _reader(types.int32, I32, 4)
write_int64 = _writer(types.int64, 8)
write_float32 = _writer(types.float32, 4)
write_int32 = _writer(types.int32, 4)
write_byte = _writer(types.uint8, 1)


@emitted(types.void, types.int64, types.int64)
def clear_bytes(builder: Builder, place: Value, num_bytes: Value) -> None:
    """Write zeros."""
    pointer = builder.inttoptr(place, I8.as_pointer())
    operands = [pointer, I8(0), num_bytes, I1(0)]
    call(builder, "llvm.memset.p0.i64", VOID, operands)


@emitted(types.void, *[types.int64] * 3)
def copy_bytes(builder: Builder, source: Value, destination: Value, num_bytes: Value) -> None:
    """Copy memory; the two places do not overlap."""
    pointers = [builder.inttoptr(place, I8.as_pointer()) for place in (destination, source)]
    call(builder, "llvm.memcpy.p0.p0.i64", VOID, [*pointers, num_bytes, ir.Constant(I1, 0)])
