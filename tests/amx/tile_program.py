"""Operations of a few instructions on tiles, whose registers have any shapes a test likes."""

from __future__ import annotations

from typing import Any

from numba import types

from kernels.cpu.amx_tiles import clear_tile, load_tile, multiply_tiles, release_tiles, store_tile
from kernels.cpu.compiled import operation
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import I8, VOID, Builder, Value, call

TOTAL, ROWS, COLUMNS = 3, 6, 1
"""The registers of a product; all others are left out of its configuration."""


@emitted(types.void, types.int64)
def _configure(builder: Builder, configuration: Value) -> None:
    call(builder, "llvm.x86.ldtilecfg", VOID, [builder.inttoptr(configuration, I8.as_pointer())])


def _product(instruction: str) -> Any:
    def emit(
        builder: Builder, rows: Value, rows_stride: Value, columns: Value, columns_stride: Value,
        total: Value, total_stride: Value,
    ) -> None:  # fmt: skip
        load_tile(builder, TOTAL, total, total_stride)
        load_tile(builder, ROWS, rows, rows_stride)
        load_tile(builder, COLUMNS, columns, columns_stride)
        multiply_tiles(builder, instruction, TOTAL, ROWS, COLUMNS)
        store_tile(builder, TOTAL, total, total_stride)

    emit.__name__ = instruction
    return emitted(types.void, *[types.int64] * 6)(emit)


@emitted(types.void, *[types.int64] * 2)
def _clear(builder: Builder, total: Value, stride: Value) -> None:
    load_tile(builder, TOTAL, total, stride)
    clear_tile(builder, TOTAL)
    store_tile(builder, TOTAL, total, stride)


_bf16, _int8 = _product("tdpbf16ps"), _product("tdpbssd")


@operation(num_arguments=7)
def bf16_product(
    configuration: int, rows: int, rows_stride: int, columns: int, columns_stride: int, total: int,
    total_stride: int,
) -> None:  # fmt: skip
    """Add rows · columns to `total`, all in memory."""
    _configure(configuration)
    _bf16(rows, rows_stride, columns, columns_stride, total, total_stride)
    release_tiles()


@operation(num_arguments=7)
def int8_product(
    configuration: int, rows: int, rows_stride: int, columns: int, columns_stride: int, total: int,
    total_stride: int,
) -> None:  # fmt: skip
    """Add rows · columns to `total`, all in memory."""
    _configure(configuration)
    _int8(rows, rows_stride, columns, columns_stride, total, total_stride)
    release_tiles()


@operation(num_arguments=3)
def cleared(configuration: int, total: int, stride: int) -> None:
    """Load a register, clear it, store it."""
    _configure(configuration)
    _clear(total, stride)
    release_tiles()
