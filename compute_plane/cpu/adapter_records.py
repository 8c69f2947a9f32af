"""The records of what adapters add to the products of a layer.

    rows of tokens ─→ product ───────────────────────────────→ OUT
               └──→ down of the token's adapter ─→ between ─→ up, added to it

Both are `kernels.cpu.adapter_product`: one record for all adapters and for all tensors that are one
packed matrix (q, k and v), which calls the products of any other matrix. They have no chunks in
pieces of tokens without adapters, and no tokens but those with one are touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.packed_adapters import UP_FORMAT
from compute_plane.cpu.pieces import PIECE_TOKENS
from compute_plane.cpu.row_buffers import product_of, row_format_of
from kernels.cpu.adapter_operands import (
    ADAPTER_CALL_BYTES,
    MATRIX_WORDS,
    AdapterMatrix,
    AdapterProduct,
)
from kernels.cpu.catalogue import adapter_product
from kernels.cpu.operands import Product, RowFormat, row_bytes
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compute_plane.cpu.packed_adapters import PackedAdapters
    from compute_plane.cpu.packed_layers import MatrixPart, PackedMatrix
    from compute_plane.cpu.row_buffers import RowBuffers
    from compute_plane.cpu.step_table import StepTable
    from compute_plane.memory.huge_pages import HugePageArena

FLOAT_BYTES: Final = 4
UP_PARTS: Final = 8
"""Into how many each `up` is cut, so that threads can share what one token reads of it."""


class AdapterRecords:
    """Adds records to a table; methods return their addresses.

    `rows`: the buffers that products read. `row_format`: in which `down` reads them.
    `scratch_bytes`: what a worker needs for the products added so far.
    """

    def __init__(
        self, table: StepTable, arena: HugePageArena, rows: RowBuffers, adapters: PackedAdapters
    ) -> None:
        self._table, self._rows, self._adapters = table, rows, adapters
        self.row_format: RowFormat = row_format_of(adapters.down_format, of_prompt=False)
        self._row_bytes = FLOAT_BYTES * adapters.max_rank  # of what is between
        self._part_bytes = PIECE_TOKENS * self._row_bytes
        most_parts = max(map(len, adapters.parts.values()), default=1)
        self._between = arena.take(most_parts * self._part_bytes).ctypes.data
        self.scratch_bytes = 0

    def changed(self, matrix: PackedMatrix) -> list[MatrixPart]:
        """Return the parts of a packed matrix that an adapter changes."""
        parts = self._adapters.parts.get(matrix.address, ())
        return [part for part in parts if any(part.name in of for of in self._adapters.pairs)]

    def added(self, matrix: PackedMatrix, out: int, stride: int, first_word: StepWord) -> list[int]:
        """Add what adapters give to rows that a product with a matrix has written or added to.

        `out`, `stride`: of the product. `first_word`: the header word that holds the first row.
        """
        parts = self.changed(matrix)
        if not parts:
            return []
        adapters = self._adapters
        downs, ups = np.zeros((2, len(adapters.pairs), len(parts), MATRIX_WORDS), dtype=np.int64)
        for number, pairs in enumerate(adapters.pairs):
            for place, part in enumerate(parts):
                pair = pairs.get(part.name)
                if pair is None:
                    continue
                between = place * self._part_bytes
                downs[number, place] = words(
                    {
                        AdapterMatrix.WEIGHTS: pair.down,
                        AdapterMatrix.N: pair.rank,
                        AdapterMatrix.K: matrix.k,
                        AdapterMatrix.OUT_OFFSET: between,
                        AdapterMatrix.OUT_STRIDE: pair.rank,
                    }
                )
                ups[number, place] = words(
                    {
                        AdapterMatrix.WEIGHTS: pair.up,
                        AdapterMatrix.N: part.n,
                        AdapterMatrix.K: pair.rank,
                        AdapterMatrix.INPUT_OFFSET: between,
                        AdapterMatrix.OUT_OFFSET: FLOAT_BYTES * part.column,
                        AdapterMatrix.OUT_STRIDE: stride,
                    }
                )
        read = self._rows.read(self.row_format)
        of_down = product_of(adapters.down_format, matrix.k, self.row_format)
        of_up = product_of(UP_FORMAT, adapters.max_rank, RowFormat.FLOAT32)
        num_groups = -(-adapters.max_rank // of_down[2])
        down: dict[int, int] = {
            **read,
            Product.OUT: self._between,
            Product.OUT_FIRST_WORD: StepWord.ZERO,
            Product.ROWS_WORD: StepWord.NUM_TOKENS,
        }
        up: dict[int, int] = {
            Product.INPUT: self._between,
            Product.OUT: out,
            Product.OUT_FIRST_WORD: first_word,
            Product.ACCUMULATE: 1,
            Product.ROWS_WORD: StepWord.NUM_TOKENS,
        }
        self.scratch_bytes = max(self.scratch_bytes, of_down[1], of_up[1])
        return [
            self._called(
                self._table.add(of_down[0], num_groups, down),
                downs,
                row_bytes(self.row_format, 1, matrix.k),
                self._row_bytes,
            ),
            self._called(
                self._table.add(of_up[0], UP_PARTS, up),
                ups,
                self._row_bytes,
                FLOAT_BYTES * stride,
            ),
        ]

    def _called(self, record: int, table: np.ndarray, input_bytes: int, out_bytes: int) -> int:
        """Add what calls a product's record for the matrices of a table."""
        self._table.keep(table)
        operands: dict[int, int] = {
            AdapterProduct.RECORD: record,
            AdapterProduct.TABLE: table.ctypes.data,
            AdapterProduct.MATRICES: table.shape[1],
            AdapterProduct.INPUT_BYTES: input_bytes,
            AdapterProduct.OUT_BYTES: out_bytes,
        }
        return self._table.add(adapter_product, StepWord.ADAPTER_CHUNKS, operands)

    @property
    def call_bytes(self) -> int:
        """Scratch memory behind that of the products."""
        return ADAPTER_CALL_BYTES if self.scratch_bytes else 0


def words(named: Mapping[AdapterMatrix, int]) -> list[int]:
    """Return the words of a matrix in a table; those that are not named are 0."""
    return [named.get(word, 0) for word in AdapterMatrix]
