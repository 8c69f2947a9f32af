"""In which form a product wants its rows, which operation it is, and where the rows lie."""

from __future__ import annotations

from typing import Final

from compute_plane.memory.huge_pages import HugePageArena
from kernels.cpu.catalogue import (
    FLOAT_PRODUCTS,
    GATED_PRODUCTS,
    INT8_PRODUCTS,
    UNPACKED_PRODUCTS,
    product_bf16_rows,
)
from kernels.cpu.float_packing import PANEL_COLUMNS
from kernels.cpu.float_sizes import GROUP_PANELS, float_scratch_bytes
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_sizes import WIDTH, int8_scratch_bytes
from kernels.cpu.operands import Product, RowFormat, RowInput, group_bytes, row_bytes
from kernels.cpu.operation import Operation

ALIGNMENT: Final = 64


def row_format_of(weight_format: str, *, of_prompt: bool) -> RowFormat:
    """Return the format of the rows that weights of a format are multiplied with.

    `of_prompt`: whether they are rows of prompt tokens. With AMX those are bfloat16 for quantised
    weights too (ADR 0009).

    BF16 weights take rows of bfloat16 where the processor multiplies pairs of them; elsewhere rows
    of float32, which are more precise and cost the same there.
    """
    chosen = selected_instruction_set()
    if weight_format in INT8_PRODUCTS:
        return RowFormat.BF16 if of_prompt and chosen.has_amx else RowFormat.INT8
    if weight_format == "BF16" and (chosen.has_amx or chosen.has_bf16_dot):
        return RowFormat.BF16
    return RowFormat.FLOAT32


def product_of(weight_format: str, k: int, row_format: RowFormat) -> tuple[Operation, int, int]:
    """Return the product of a weight format: operation, scratch bytes, columns it takes at once."""
    if row_format == RowFormat.INT8:
        return INT8_PRODUCTS[weight_format], int8_scratch_bytes(k), WIDTH
    is_quantised = weight_format in INT8_PRODUCTS
    if is_quantised:
        operation = UNPACKED_PRODUCTS[weight_format]
    elif row_format == RowFormat.BF16:
        operation = product_bf16_rows
    else:
        operation = FLOAT_PRODUCTS[weight_format]
    scratch_bytes = float_scratch_bytes(is_quantised=is_quantised)
    return operation, scratch_bytes, GROUP_PANELS * PANEL_COLUMNS


def gated_product_of(
    weight_format: str, n: int, row_format: RowFormat
) -> tuple[Operation, int, int] | None:
    """Return the product of gate and up columns that gates its own sums; None if there is none.

    Operation, scratch bytes, columns of gate and up it takes at once. It writes rows of bfloat16.
    """
    width = 2 * PANEL_COLUMNS
    has_amx = selected_instruction_set().has_amx
    if not has_amx or row_format != RowFormat.BF16 or n % width:
        return None
    scratch_bytes = float_scratch_bytes(is_quantised=weight_format in INT8_PRODUCTS)
    return GATED_PRODUCTS[weight_format], scratch_bytes, width


class RowBuffers:
    """The rows a product reads: written by `row_inputs`, read by the records right behind it.

    `gated`: address of bfloat16 rows of `max_k` elements that a product writes while it reads its
    own. `outputs`: of float32 rows that attention or MLP gives, where they are normalised before
    they are added.
    """

    def __init__(self, arena: HugePageArena, max_rows: int, max_k: int) -> None:
        self.gated = arena.take(row_bytes(RowFormat.BF16, max_rows, max_k) + ALIGNMENT).ctypes.data
        self.outputs = arena.take(row_bytes(RowFormat.FLOAT32, max_rows, max_k)).ctypes.data
        beside = group_bytes(max_rows, max_k)
        self._places: dict[RowFormat, dict[int, int]] = {}
        for row_format in RowFormat:
            sizes = {
                RowInput.OUT: row_bytes(row_format, max_rows, max_k) + ALIGNMENT,
                RowInput.OUT_SCALES: beside,
                RowInput.OUT_SCALED_SUMS: beside,
                RowInput.OUT_SUMS: beside,
                RowInput.OUT_PAIR_SUMS: beside,
                RowInput.OUT_BEGINS: beside,
            }
            self._places[row_format] = {
                name: arena.take(size).ctypes.data for name, size in sizes.items()
            }

    def written(self, row_format: RowFormat) -> dict[int, int]:
        """Return the operands of a row input that writes rows of a format."""
        return {RowInput.FORMAT: row_format, **self._places[row_format]}

    def read(self, row_format: RowFormat) -> dict[int, int]:
        """Return the operands of a product that reads them."""
        places = self._places[row_format]
        return {
            Product.INPUT: places[RowInput.OUT],
            Product.INPUT_SCALES: places[RowInput.OUT_SCALES],
            Product.INPUT_SCALED_SUMS: places[RowInput.OUT_SCALED_SUMS],
            Product.INPUT_SUMS: places[RowInput.OUT_SUMS],
            Product.INPUT_PAIR_SUMS: places[RowInput.OUT_PAIR_SUMS],
            Product.INPUT_BEGINS: places[RowInput.OUT_BEGINS],
        }
