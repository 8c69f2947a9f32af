"""The records behind a model's layers: logits, and hidden states that leave the plane.

after    norm of the rows whose logits are wanted → logits (→ capped)       once 64 rows
embed    norm of the rows whose hidden states are wanted                    once 64 rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.hidden_reads import HiddenReads
from compute_plane.cpu.product_records import ProductRecords, float_bits
from compute_plane.cpu.step_table import StepTable
from compute_plane.executor.interface import Float32Array
from compute_plane.memory.huge_pages import HugePageArena
from kernels.cpu.catalogue import cap_logits, sampled_rows
from kernels.cpu.operands import LogitsCap, RowFormat, RowInput
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedWeights
    from compute_plane.model.spec import ModelSpec

LOGITS_ROWS: Final = 64
"""Rows of logits that exist at once; with a vocabulary of 50 000 they take 12 MiB."""
CAP_CHUNKS: Final = 16
FLOAT_BYTES: Final = 4


class LogitsRecords:
    """The records, and the buffers they write.

    `hidden`: how hidden states are read. `logits`: float32 [LOGITS_ROWS, vocabulary].
    `after`: addresses of the records that write them, in order. `embed`: address of the record that
    normalises rows into `embedded`: float32 [LOGITS_ROWS, hidden].
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        spec: ModelSpec,
        weights: PackedWeights,
        products: ProductRecords,
        *,
        hidden: HiddenReads,
    ) -> None:
        def rows(width: int) -> Float32Array:
            memory = arena.take(FLOAT_BYTES * LOGITS_ROWS * width)
            return memory.view(np.float32).reshape(LOGITS_ROWS, width)

        self._table, self._spec = table, spec
        self.logits, self.embedded = rows(spec.vocab_size), rows(spec.hidden_size)
        wanted: dict[int, int] = {RowInput.ROWS_WORD: StepWord.NUM_OUT_ROWS}
        logits, lm_head = self.logits.ctypes.data, weights.lm_head
        normed = hidden.normed(weights.final_norm) | wanted
        self.after = (
            *products.rows(sampled_rows, [lm_head], normed, chunks=StepWord.OUT_CHUNKS),
            *products.of_sampled_rows(lm_head, logits, spec.vocab_size),
            *self._capped(logits),
        )
        self.embed = table.add(
            sampled_rows,
            StepWord.OUT_CHUNKS,
            {
                **hidden.normed(weights.embedding_norm),
                **wanted,
                RowInput.K: spec.hidden_size,
                RowInput.FORMAT: RowFormat.FLOAT32,
                RowInput.OUT: self.embedded.ctypes.data,
            },
        )

    def _capped(self, logits: int) -> list[int]:
        """Return what caps logits, where a model does."""
        cap = self._spec.logits_cap
        if cap is None:
            return []
        operands: dict[int, int] = {
            LogitsCap.LOGITS: logits,
            LogitsCap.VOCAB: self._spec.vocab_size,
            LogitsCap.CAP: float_bits(cap),
        }
        return [self._table.add(cap_logits, CAP_CHUNKS, operands)]
