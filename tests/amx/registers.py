"""The tile registers of threads, in memory, and what instructions do with them.

A thread has registers from the time it configures them until it gives them up:

    │ owner 8 │ … 64 │ configuration 64 │ 8 registers of 16 rows × 64 bytes │

Arguments are addresses and numbers; what instructions do is a function that returns a `Fault`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu.amx_tiles import COLUMNS_AT, CONFIGURATION_BYTES, PALETTE, ROWS_AT
from kernels.cpu.atomics import compare_and_swap
from kernels.cpu.compiled import inlined, int64_at, uint8_at, uint16_at, word
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import I8, I16, I64, VOID, Builder, Value, call, i64, load, offset
from tests.amx.products import (
    flush_subnormal_numbers,
    multiply_bf16,
    multiply_int8,
    set_mxcsr,
)

ROWS: Final = 16
ROW_BYTES: Final = 64
REGISTERS: Final = 8
_REGISTER_BYTES: Final = ROWS * ROW_BYTES
_CONFIGURATION: Final = 64
_FIRST: Final = _CONFIGURATION + CONFIGURATION_BYTES
_ROWS_OF: Final = _CONFIGURATION + ROWS_AT
_COLUMNS_OF: Final = _CONFIGURATION + COLUMNS_AT
_THREAD_BYTES: Final = _FIRST + REGISTERS * _REGISTER_BYTES
_THREADS: Final = 64
_memory: Final = np.zeros((_THREADS, _THREAD_BYTES), np.uint8)
_THREADS_AT: Final = _memory.ctypes.data


class Fault(IntEnum):
    """Why an instruction is not done."""

    NONE = 0
    OTHER = 1
    CONFIGURATION = 2
    THREADS = 3
    REGISTER = 4
    SAME = 5
    SHAPES = 6


REASONS: Final = {
    Fault.CONFIGURATION: "a configuration that no processor takes",
    Fault.THREADS: f"more than {_THREADS} threads have tile registers",
    Fault.REGISTER: "a register that is not configured, or not of whole elements",
    Fault.SAME: "a register that is two operands of one product",
    Fault.SHAPES: "a product of registers whose shapes do not fit",
}

# A compiled function knows numbers only.
_NONE: Final = int(Fault.NONE)
_WRONG: Final = int(Fault.CONFIGURATION)
_TOO_MANY: Final = int(Fault.THREADS)
_UNUSABLE: Final = int(Fault.REGISTER)
_SAME: Final = int(Fault.SAME)
_UNFIT: Final = int(Fault.SHAPES)


def threads_with_registers() -> int:
    """Return how many threads have not given theirs up."""
    return int(np.count_nonzero(_memory[:, :8].copy().view(np.int64)))


@emitted(types.int64)
def _this_thread(builder: Builder) -> Value:
    """Return a number that no other living thread has: the address of what is its own."""
    return builder.asm(ir.FunctionType(I64, []), "movq %fs:0, $0", "=r", [], True)


@emitted(types.void, *[types.int64] * 2)
def _set_zero(builder: Builder, address: Value, num_bytes: Value) -> None:
    pointer = builder.inttoptr(address, I8.as_pointer())
    never = ir.Constant(ir.IntType(1), 0)
    call(builder, "llvm.memset.p0.i64", VOID, [pointer, ir.Constant(I8, 0), num_bytes, never])


@inlined()
def registers_of_this_thread() -> int:
    """Return the address of the calling thread's registers; 0 if it has none."""
    this = _this_thread()
    for index in range(_THREADS):
        at = _THREADS_AT + _THREAD_BYTES * index
        if word(at, 0) == this:
            return at
    return 0


@inlined()
def release() -> int:
    """TILERELEASE: give up the calling thread's registers."""
    at = registers_of_this_thread()
    if at != 0:
        int64_at(at)[0] = 0
    return _NONE


@inlined()
def _is_allowed(source: int) -> bool:
    stated, columns = uint8_at(source), uint16_at(source + COLUMNS_AT)
    if stated[0] != PALETTE:
        return False
    for i in range(1, CONFIGURATION_BYTES):
        has_columns = COLUMNS_AT <= i < COLUMNS_AT + 2 * REGISTERS
        has_rows = ROWS_AT <= i < ROWS_AT + REGISTERS
        if stated[i] != 0 and not has_columns and not has_rows:
            return False
    for number in range(REGISTERS):
        rows, row_bytes = stated[ROWS_AT + number], columns[number]
        if rows > ROWS or row_bytes > ROW_BYTES or (rows == 0) != (row_bytes == 0):
            return False
    return True


@inlined()
def configure(source: int) -> int:
    """LDTILECFG: take a configuration; all registers become zeros."""
    if not _is_allowed(source):
        return _WRONG
    at = registers_of_this_thread()
    for index in range(_THREADS):
        free = _THREADS_AT + _THREAD_BYTES * index
        if at == 0 and compare_and_swap(free, 0, _this_thread()):
            at = free
    if at == 0:
        return _TOO_MANY
    _set_zero(at + _FIRST, REGISTERS * _REGISTER_BYTES)
    for i in range(CONFIGURATION_BYTES):
        uint8_at(at + _CONFIGURATION)[i] = uint8_at(source)[i]
    return _NONE


@emitted(types.int64, *[types.int64] * 2)
def _rows(builder: Builder, at: Value, number: Value) -> Value:
    return builder.zext(load(builder, offset(builder, at, number, _ROWS_OF), I8), I64)


@emitted(types.int64, *[types.int64] * 2)
def _row_bytes(builder: Builder, at: Value, number: Value) -> Value:
    place = offset(builder, at, builder.shl(number, i64(1)), _COLUMNS_OF)
    return builder.zext(load(builder, place, I16), I64)


@inlined()
def _is_usable(at: int, number: int) -> bool:
    if at == 0 or number >= REGISTERS:
        return False
    return _rows(at, number) != 0 and _row_bytes(at, number) % 4 == 0


@inlined()
def clear(at: int, number: int) -> int:
    """TILEZERO."""
    if not _is_usable(at, number):
        return _UNUSABLE
    _set_zero(at + _FIRST + _REGISTER_BYTES * number, _REGISTER_BYTES)
    return _NONE


@inlined()
def move(at: int, number: int, memory: int, stride: int, is_store: bool) -> int:
    """TILELOADD, TILESTORED: rows and columns as configured, and not a byte more."""
    if not _is_usable(at, number):
        return _UNUSABLE
    first, row_bytes = at + _FIRST + _REGISTER_BYTES * number, _row_bytes(at, number)
    for row in range(_rows(at, number)):
        held, outside = uint8_at(first + ROW_BYTES * row), uint8_at(memory + stride * row)
        for i in range(row_bytes):
            if is_store:
                outside[i] = held[i]
            else:
                held[i] = outside[i]
    return _NONE


@inlined()
def multiply(at: int, total: int, rows: int, columns: int, is_bf16: bool) -> int:
    """TDPBF16PS, TDPBSSD: add rows · columns to `total`."""
    if not (_is_usable(at, total) and _is_usable(at, rows) and _is_usable(at, columns)):
        return _UNUSABLE
    if total in (rows, columns) or rows == columns:
        return _SAME
    num_rows, depth = _rows(at, total), _rows(at, columns)
    if num_rows != _rows(at, rows) or depth != _row_bytes(at, rows) // 4:
        return _UNFIT
    if _row_bytes(at, total) != _row_bytes(at, columns):
        return _UNFIT
    first = at + _FIRST
    x, y = first + _REGISTER_BYTES * rows, first + _REGISTER_BYTES * columns
    z = first + _REGISTER_BYTES * total
    if is_bf16:
        before = flush_subnormal_numbers()
        multiply_bf16(x, y, z, num_rows, depth)
        set_mxcsr(before)
    else:
        multiply_int8(x, y, z, num_rows, depth)
    return _NONE
