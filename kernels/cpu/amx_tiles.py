"""The AMX tile registers, as LLVM IR: their shapes, loading, storing, multiplying.

A register is 16 rows of 64 bytes at most; its shape holds from `configure` to `release_tiles`. A
thread that uses them configures them first and gives them up last, so that the system saves them
for nobody else. Which register is what is its user's matter (`bf16_amx`, `int8_amx`,
`attention_amx`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import I8, I16, I64, VOID, Builder, Value, call, i64, offset, store

PALETTE: Final = 1
CONFIGURATION_BYTES: Final = 64
COLUMNS_AT: Final = 16
ROWS_AT: Final = 48
"""The configuration: byte 0 the palette, from 16 the bytes of a row of each register (uint16), from
48 the rows of each register (uint8)."""

_POINTER: Final = I8.as_pointer()


def configure(builder: Builder, shapes: Mapping[int, tuple[Value | int, int]]) -> None:
    """Set up this thread's registers. `shapes`: register → rows (int64), bytes of a row.

    A register of no rows is a fault of the processor.
    """
    kind = ir.ArrayType(I8, CONFIGURATION_BYTES)
    memory = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), memory)
    address = builder.ptrtoint(memory, I64)
    store(builder, ir.Constant(I8, PALETTE), address)
    for number, (rows, row_bytes) in shapes.items():
        count = ir.Constant(I8, rows) if isinstance(rows, int) else builder.trunc(rows, I8)
        store(
            builder, ir.Constant(I16, row_bytes), offset(builder, address, COLUMNS_AT + 2 * number)
        )
        store(builder, count, offset(builder, address, ROWS_AT + number))
    call(builder, "llvm.x86.ldtilecfg", VOID, [builder.inttoptr(address, _POINTER)])


@emitted(types.void)
def release_tiles(builder: Builder) -> None:
    """Give up the tile registers, so that the system need not save them."""
    call(builder, "llvm.x86.tilerelease", VOID, [])


def load_tile(builder: Builder, number: int, address: Value, stride: Value | int) -> None:
    """Load a register from rows `stride` bytes apart."""
    call(builder, "llvm.x86.tileloadd64", VOID, _memory(builder, number, address, stride))


def store_tile(builder: Builder, number: int, address: Value, stride: Value | int) -> None:
    """Store a register to rows `stride` bytes apart."""
    call(builder, "llvm.x86.tilestored64", VOID, _memory(builder, number, address, stride))


def clear_tile(builder: Builder, number: int) -> None:
    """Set a register to zeros."""
    call(builder, "llvm.x86.tilezero", VOID, [_register(number)])


def multiply_tiles(builder: Builder, instruction: str, total: int, rows: int, columns: int) -> None:
    """Add rows · columns to `total`, by TDPBF16PS or TDPBSSD: `instruction`, in small letters."""
    operands = [_register(number) for number in (total, rows, columns)]
    call(builder, f"llvm.x86.{instruction}", VOID, operands)


def _register(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _memory(builder: Builder, number: int, address: Value, stride: Value | int) -> list[Value]:
    step = i64(stride) if isinstance(stride, int) else stride
    return [_register(number), builder.inttoptr(address, _POINTER), step]
