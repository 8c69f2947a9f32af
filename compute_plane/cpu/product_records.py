"""The records of matrix products, and of the rows they read, for one kind of tokens.

The rows that several matrices read are made once for each format. A matrix that wants its inputs in
an order of its own has them sorted, and written in its format, right before its product:

    rows   made ─→ int8    ─────────────────────────→ products
                └→ float32 ─→ sorted for a ─→ int8 ─→ product with a
                           ─→ sorted for b ─→ int8 ─→ product with b

All rows of a format lie in one place, so products that need none sorted go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.row_buffers import (
    RowBuffers,
    gated_product_of,
    product_of,
    row_format_of,
)
from compute_plane.cpu.step_table import StepTable
from kernels.cpu.catalogue import (
    add_bias,
    add_normed_rows,
    gated_rows,
    gelu_rows,
    ordered_rows,
    relu2_rows,
)
from kernels.cpu.operands import BiasRecord, NormedSum, Product, RowFormat, RowInput
from kernels.cpu.operation import Operation, StepWord

if TYPE_CHECKING:
    from compute_plane.cpu.adapter_records import AdapterRecords
    from compute_plane.cpu.packed_layers import PackedMatrix
    from compute_plane.model.architectures import Activation

FLOAT_BYTES: Final = 4


def float_bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(value).view(np.uint32))


MLP_ROWS: Final[Mapping[Activation, Operation]] = {
    "silu": gated_rows,
    "gelu": gelu_rows,
    "relu2": relu2_rows,
}
"""What makes the rows that down reads of what gate and up give, by activation."""
CHUNK_WEIGHTS: Final = 32 * 1024
"""Weights of a chunk of a product, about: a microsecond or two of one row."""
MOST_PRODUCT_CHUNKS: Final = 64


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """What products add to: `address` of float32 [tokens of the step, hidden].

    `norm`: address of the weights of the norm that comes before the addition, None for none;
    `epsilon`: its bits; `scale`: what the sum is multiplied by then. `bias`: address of float32
    [hidden] that is added as well, without a norm.
    """

    address: int
    norm: int | None = None
    epsilon: int = 0
    scale: float = 1.0
    bias: int | None = None


class ProductRecords:
    """Adds records to a table; each method returns their addresses.

    `rows`: the buffers between row inputs and products. `of_prompt`: whether the tokens are those
    of prompts, which may take other formats of rows (`row_buffers.row_format_of`). `fetches`:
    whether every step reads the weights, so that they may be fetched ahead. `adapters`: what adds
    to products where there are adapters. `scratch_bytes`: what a worker needs for the products
    added so far, and for that.
    """

    def __init__(
        self,
        table: StepTable,
        rows: RowBuffers,
        *,
        of_prompt: bool,
        fetches: bool = True,
        adapters: AdapterRecords | None = None,
    ) -> None:
        self._table = table
        self._rows = rows
        self._of_prompt = of_prompt
        self._fetches = fetches
        self._adapters = adapters
        self.scratch_bytes = 0

    def format_of(self, matrix: PackedMatrix) -> RowFormat:
        """Return the format of the rows that a matrix is multiplied with."""
        return row_format_of(matrix.format, of_prompt=self._of_prompt)

    def rows(
        self,
        maker: Operation,
        matrices: Sequence[PackedMatrix],
        operands: Mapping[int, int],
        *,
        chunks: StepWord = StepWord.TOKEN_CHUNKS,
    ) -> list[int]:
        """Make the rows that some matrices read, once for each format of rows among them."""
        formats = dict.fromkeys(
            self.format_of(matrix) if matrix.input_order is None else RowFormat.FLOAT32
            for matrix in matrices
        )
        shared: dict[int, int] = {
            RowInput.SOURCE_FIRST_WORD: StepWord.ZERO,
            RowInput.ROWS_WORD: StepWord.NUM_TOKENS,
            RowInput.K: matrices[0].k,
        }
        return [
            self._table.add(maker, chunks, {**shared, **operands, **self._rows.written(row_format)})
            for row_format in formats
        ]

    def beside_each_other(
        self, matrices: Sequence[PackedMatrix], out: int, stride: int
    ) -> list[int]:
        """Multiply with matrices whose columns lie beside each other in OUT."""
        return [
            record
            for matrix in sorted(matrices, key=lambda matrix: matrix.input_order is not None)
            for record in self.product(matrix, out + FLOAT_BYTES * matrix.first_column, stride)
        ]

    def gated(
        self,
        gate_up: Sequence[PackedMatrix],
        down: PackedMatrix,
        sums: int,
        hidden: HiddenRows,
        *,
        activation: Activation = "silu",
    ) -> list[int]:
        """Multiply with gate and up, gate, multiply with down, add to the hidden states.

        `sums`: address of float32 [tokens, gate | up], for products that do not gate their own.
        """
        gated, read = self._gated_rows(gate_up, down, sums, activation)
        return [*gated, *self._added(down, hidden, read)]

    def gated_into(
        self,
        gate_up: Sequence[PackedMatrix],
        down: PackedMatrix,
        sums: int,
        out: int,
        *,
        activation: Activation = "silu",
    ) -> list[int]:
        """Multiply with gate and up, gate, multiply with down into `out`.

        `out`: address of float32 [tokens, outputs of down].
        """
        gated, read = self._gated_rows(gate_up, down, sums, activation)
        return [*gated, *self.product(down, out, down.n, read)]

    def _gated_rows(
        self,
        gate_up: Sequence[PackedMatrix],
        down: PackedMatrix,
        sums: int,
        activation: Activation,
    ) -> tuple[list[int], dict[int, int]]:
        """Return records that make the rows that down reads, and its operands for them."""
        fused = self.gated_product(gate_up, down) if activation == "silu" else None
        if fused is not None:
            return fused, self.gated_input
        width = sum(matrix.n for matrix in gate_up)
        source: dict[int, int] = {RowInput.SOURCE: sums, RowInput.SOURCE_STRIDE: width}
        made = [
            *self.beside_each_other(gate_up, sums, width),
            *self.rows(MLP_ROWS[activation], [down], source),
        ]
        return made, {}

    @property
    def gated_input(self) -> dict[int, int]:
        """The operands of a product behind `gated_product`."""
        return {Product.INPUT: self._rows.gated}

    def gated_product(
        self, gate_up: Sequence[PackedMatrix], down: PackedMatrix
    ) -> list[int] | None:
        """Multiply with gate and up, and gate; None if no product gates its own sums."""
        if len(gate_up) != 1 or self.format_of(down) != RowFormat.BF16:
            return None
        if self._adapters is not None and any(map(self._adapters.changed, (*gate_up, down))):
            return None
        [matrix] = gate_up
        product = gated_product_of(matrix.format, matrix.n, self.format_of(matrix))
        if product is None:
            return None
        return self._record(product, matrix, self._rows.gated, matrix.n // 2)

    def added(self, matrix: PackedMatrix, hidden: HiddenRows) -> list[int]:
        """Multiply and add to the hidden states, normalised before if they say so."""
        return self._added(matrix, hidden, {})

    def _added(
        self, matrix: PackedMatrix, hidden: HiddenRows, operands: Mapping[int, int]
    ) -> list[int]:
        if hidden.norm is not None:
            norm: dict[int, int] = {
                NormedSum.SOURCE: self._rows.outputs,
                NormedSum.K: matrix.n,
                NormedSum.HIDDEN: hidden.address,
                NormedSum.WEIGHT: hidden.norm,
                NormedSum.EPSILON: hidden.epsilon,
                NormedSum.SCALE: float_bits(hidden.scale),
                NormedSum.PARTS: 1,
                NormedSum.SOURCE_FIRST_WORD: StepWord.ZERO,
            }
            return [
                *self.product(matrix, self._rows.outputs, matrix.n, operands),
                self._table.add(add_normed_rows, StepWord.TOKEN_CHUNKS, norm),
            ]
        first: dict[int, int] = {Product.OUT_FIRST_WORD: StepWord.FIRST_TOKEN}
        return [
            *self.product(
                matrix, hidden.address, matrix.n, {**operands, **first, Product.ACCUMULATE: 1}
            ),
            *self.bias(hidden.bias, hidden.address, matrix.n, StepWord.FIRST_TOKEN),
        ]

    def bias(self, bias: int | None, out: int, n: int, first: StepWord) -> list[int]:
        """Add a bias, if there is one, to rows of n that a product has written.

        `first`: the header word that holds the first row of `out`.
        """
        if bias is None:
            return []
        operands: dict[int, int] = {
            BiasRecord.OUT: out,
            BiasRecord.N: n,
            BiasRecord.BIAS: bias,
            BiasRecord.OUT_FIRST_WORD: first,
        }
        return [self._table.add(add_bias, StepWord.TOKEN_CHUNKS, operands)]

    def of_sampled_rows(self, matrix: PackedMatrix, out: int, stride: int) -> list[int]:
        """Multiply the rows whose logits are wanted."""
        return self.product(matrix, out, stride, {Product.ROWS_WORD: StepWord.NUM_OUT_ROWS})

    def product(
        self,
        matrix: PackedMatrix,
        out: int,
        stride: int,
        operands: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Multiply into rows `stride` elements apart. `operands`: what is not as usual."""
        product = product_of(matrix.format, matrix.k, self.format_of(matrix))
        made = self._record(product, matrix, out, stride, operands)
        if self._adapters is not None:
            first_word = StepWord(operands.get(Product.OUT_FIRST_WORD, StepWord.ZERO))
            made += self._adapters.added(matrix, self.format_of(matrix), out, stride, first_word)
            self.scratch_bytes = max(self.scratch_bytes, self._adapters.scratch_bytes)
        return made

    def _record(
        self,
        product: tuple[Operation, int, int],
        matrix: PackedMatrix,
        out: int,
        stride: int,
        operands: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        ordered = self._ordered(matrix, operands.get(Product.ROWS_WORD, StepWord.NUM_TOKENS))
        operation, scratch_bytes, width = product
        self.scratch_bytes = max(self.scratch_bytes, scratch_bytes)
        num_chunks = min(MOST_PRODUCT_CHUNKS, matrix.n * matrix.k // CHUNK_WEIGHTS)
        record = self._table.add(
            operation,
            max(1, min(num_chunks, -(-matrix.n // width))),
            {
                **self._rows.read(self.format_of(matrix)),
                Product.WEIGHTS: matrix.address,
                Product.K: matrix.k,
                Product.N: matrix.n,
                Product.OUT: out,
                Product.OUT_STRIDE: stride,
                Product.ACCUMULATE: 0,
                Product.ROWS_WORD: StepWord.NUM_TOKENS,
                Product.OUT_FIRST_WORD: StepWord.ZERO,
                **operands,
            },
            reads=(matrix.address, matrix.num_bytes) if self._fetches else None,
        )
        return [*ordered, record]

    def _ordered(self, matrix: PackedMatrix, rows_word: int) -> list[int]:
        """Sort the rows of float32 for a matrix, if it wants that."""
        if matrix.input_order is None:
            return []
        self._table.keep(matrix.input_order)
        is_sampled = rows_word == StepWord.NUM_OUT_ROWS
        operands: dict[int, int] = {
            RowInput.SOURCE: self._rows.written(RowFormat.FLOAT32)[RowInput.OUT],
            RowInput.SOURCE_STRIDE: matrix.k,
            RowInput.SOURCE_FIRST_WORD: StepWord.ZERO,
            RowInput.ROWS_WORD: rows_word,
            RowInput.K: matrix.k,
            RowInput.ORDER: matrix.input_order.ctypes.data,
            **self._rows.written(self.format_of(matrix)),
        }
        chunks = StepWord.OUT_CHUNKS if is_sampled else StepWord.TOKEN_CHUNKS
        return [self._table.add(ordered_rows, chunks, operands)]
