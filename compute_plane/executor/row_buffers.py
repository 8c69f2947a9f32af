"""In which form a product wants its rows, which operation it is, and where the rows lie."""

from __future__ import annotations

from typing import Final

from compute_plane.executor.step_table import StepTable
from compute_plane.memory.huge_pages import huge_page_array
from kernels.cpu.float_packing import PANEL_COLUMNS
from kernels.cpu.float_products import (
    GROUP_PANELS,
    SCRATCH_BYTES,
    product_bf16,
    product_bf16_rows,
    product_f16,
    product_f32,
)
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_products import INT8_PRODUCTS, WIDTH, int8_scratch_bytes
from kernels.cpu.matrix_product import Product
from kernels.cpu.operation import Operation
from kernels.cpu.row_inputs import RowInput, group_bytes, row_bytes
from kernels.cpu.row_values import RowFormat

ALIGNMENT: Final = 64

_FLOAT_PRODUCTS: Final = {"F32": product_f32, "F16": product_f16, "BF16": product_bf16}


def row_format_of(weight_format: str) -> RowFormat:
    """Return the format of the rows that weights of a format are multiplied with.

    BF16 weights take rows of bfloat16 where the processor multiplies pairs of them; elsewhere rows
    of float32, which are more precise and cost the same there.
    """
    if weight_format in INT8_PRODUCTS:
        return RowFormat.INT8
    chosen = selected_instruction_set()
    if weight_format == "BF16" and (chosen.has_amx or chosen.has_bf16_dot):
        return RowFormat.BF16
    return RowFormat.FLOAT32


def product_of(weight_format: str, k: int) -> tuple[Operation, int, int]:
    """Return the product of a weight format: operation, scratch bytes, columns it takes at once."""
    if weight_format in INT8_PRODUCTS:
        return INT8_PRODUCTS[weight_format], int8_scratch_bytes(k), WIDTH
    operation = _FLOAT_PRODUCTS[weight_format]
    if row_format_of(weight_format) == RowFormat.BF16:
        operation = product_bf16_rows
    return operation, SCRATCH_BYTES, GROUP_PANELS * PANEL_COLUMNS


class RowBuffers:
    """The rows a product reads: written by `row_inputs`, read by the product right behind it."""

    def __init__(self, table: StepTable, max_rows: int, max_k: int) -> None:
        sizes = {
            RowInput.OUT: row_bytes(RowFormat.FLOAT32, max_rows, max_k),
            RowInput.OUT_SCALES: group_bytes(max_rows, max_k),
            RowInput.OUT_SCALED_SUMS: group_bytes(max_rows, max_k),
            RowInput.OUT_SUMS: group_bytes(max_rows, max_k),
        }
        self._places: dict[RowFormat, dict[int, int]] = {}
        for row_format in RowFormat:
            places: dict[int, int] = {}
            for name, size in sizes.items():
                memory = huge_page_array(size + ALIGNMENT, purpose="activations")
                table.keep(memory)
                places[name] = memory.ctypes.data
            self._places[row_format] = places

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
        }
