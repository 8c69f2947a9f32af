"""The records of what adapters add to the products of a layer.

    rows of tokens ─→ product ───────────────────────────────→ OUT
               └──→ down of the token's adapter ─→ between ─→ up, added to it

One record for all adapters and for all tensors that are one packed matrix (q, k and v), which calls
the products of any other matrix (`kernels.cpu.adapter_sums`). No tokens but those with an adapter
are touched. Pieces without any go through records without these (`model_table`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compute_plane.cpu.packed_adapters import down_format_of
from compute_plane.cpu.row_buffers import product_of
from kernels.cpu.adapter_operands import (
    FEW_WEIGHTS,
    FLOAT_BYTES,
    LEAST_ITEMS,
    PAIR_WORDS,
    AdapterPair,
    AdapterSums,
    adapter_scratch_bytes,
    between_bytes,
)
from kernels.cpu.catalogue import adapter_sums
from kernels.cpu.operands import Product, RowFormat, group_bytes, row_bytes
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from compute_plane.cpu.packed_adapters import PackedAdapters
    from compute_plane.cpu.packed_layers import MatrixPart, PackedMatrix
    from compute_plane.cpu.row_buffers import RowBuffers
    from compute_plane.cpu.step_table import StepTable


class AdapterRecords:
    """Adds records to a table; `rows`: the buffers that products read.

    `scratch_bytes`: what a worker needs for what was added so far.
    """

    def __init__(self, table: StepTable, rows: RowBuffers, adapters: PackedAdapters) -> None:
        self._table, self._rows, self._adapters = table, rows, adapters
        self.scratch_bytes = 0

    def changed(self, matrix: PackedMatrix) -> list[MatrixPart]:
        """Return the parts of a packed matrix that an adapter changes."""
        parts = self._adapters.parts.get(matrix.address, ())
        return [part for part in parts if any(part.name in of for of in self._adapters.pairs)]

    def added(
        self,
        matrix: PackedMatrix,
        row_format: RowFormat,
        out: int,
        stride: int,
        first_word: StepWord,
    ) -> list[int]:
        """Add what adapters give to rows that a product with a matrix has written or added to.

        `row_format`: in which the product reads rows. `out`, `stride`: of the product.
        `first_word`: the header word that holds the first row.
        """
        parts = self.changed(matrix)
        if not parts:
            return []
        adapters, k = self._adapters, matrix.k
        table = np.zeros((len(adapters.pairs), len(parts), PAIR_WORDS), dtype=np.int64)
        for words_of, pairs in zip(table, adapters.pairs, strict=True):
            for words, part in zip(words_of, parts, strict=True):
                pair = pairs.get(part.name)
                if pair is not None:
                    words[AdapterPair.DOWN], words[AdapterPair.UP] = pair.down, pair.up
                    words[AdapterPair.RANK], words[AdapterPair.N] = pair.rank, part.n
                    words[AdapterPair.OUT_OFFSET] = FLOAT_BYTES * part.column
        self._table.keep(table)
        down = product_of(down_format_of(matrix.format, adapters.dtype).label, k, row_format)
        up = product_of(adapters.up_format.label, adapters.max_rank, RowFormat.FLOAT32)
        self.scratch_bytes = max(
            self.scratch_bytes, max(down[1], up[1]) + adapter_scratch_bytes(adapters.max_rank)
        )
        of_down: dict[int, int] = {
            **self._rows.read(row_format),
            Product.K: k,
            Product.ROWS_WORD: StepWord.NUM_TOKENS,
            Product.OUT_FIRST_WORD: StepWord.ZERO,
        }
        of_up: dict[int, int] = {
            Product.OUT: out,
            Product.OUT_STRIDE: stride,
            Product.ACCUMULATE: 1,
            Product.ROWS_WORD: StepWord.NUM_TOKENS,
            Product.OUT_FIRST_WORD: first_word,
        }
        # Both are called, nobody walks to them.
        operands: dict[int, int] = {
            AdapterSums.DOWN: self._table.add(down[0], 1, of_down),
            AdapterSums.UP: self._table.add(up[0], 1, of_up),
            AdapterSums.TABLE: table.ctypes.data,
            AdapterSums.MATRICES: len(parts),
            AdapterSums.INPUT_BYTES: row_bytes(row_format, 1, k),
            AdapterSums.GROUP_BYTES: group_bytes(1, k),
            AdapterSums.BETWEEN_BYTES: between_bytes(adapters.max_rank),
            AdapterSums.LEAST_ITEMS: LEAST_ITEMS if k * adapters.max_rank <= FEW_WEIGHTS else 1,
        }
        return [self._table.add(adapter_sums, StepWord.ADAPTER_CHUNKS, operands)]
