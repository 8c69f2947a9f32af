"""The records of what layers read of a second embedding (see `model.layer_inputs_layout`).

before   second embedding ─→ inputs
hidden rows ─→ projection ─→ norm, added, times 1/√2 ─→ inputs        [T, L, P]
layer    hidden rows ─→ gate ─→ GELU · inputs ─→ output ─→ norm, added to hidden
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from compute_plane.cpu.hidden_reads import HiddenReads
from compute_plane.cpu.pieces import PIECE_TOKENS
from compute_plane.cpu.product_records import HiddenRows, float_bits
from kernels.cpu.catalogue import EMBEDDINGS, add_normed_rows, gelu_rows_apart
from kernels.cpu.operands import EmbeddingRecord, NormedSum, RowInput
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedLayerInput, PackedLayerInputs
    from compute_plane.cpu.product_records import ProductRecords
    from compute_plane.cpu.step_table import StepTable
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.model.spec import ModelSpec

FLOAT_BYTES: Final = 4


class LayerInputRecords:
    """Adds records to a table; methods return their addresses.

    `step_rows`: of buffers that hold all tokens of a step.
    `hidden`: how hidden states are read. `rows`: address and width of the inputs of all layers.
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        spec: ModelSpec,
        *,
        step_rows: int,
        hidden: HiddenReads,
    ) -> None:
        self._table, self._spec, self._hidden = table, spec, hidden
        self._width = spec.num_layers * spec.layer_input_size

        def floats(count: int) -> int:
            return arena.take(FLOAT_BYTES * count).ctypes.data

        self._inputs = floats(step_rows * self._width)
        self._projected = floats(PIECE_TOKENS * self._width)
        self._gates = floats(PIECE_TOKENS * spec.layer_input_size)
        self.rows = self._inputs, self._width

    def before(self, of: PackedLayerInputs, products: ProductRecords) -> list[int]:
        """Make the inputs of all layers, behind the embedding."""
        spec = self._spec
        # What is projected is divided by √hidden: so is what the norm's epsilon is added to.
        epsilon = spec.rms_norm_eps * spec.hidden_size
        return [
            self._table.add(
                EMBEDDINGS[of.embedding.format],
                StepWord.TOKEN_CHUNKS,
                {
                    EmbeddingRecord.WEIGHTS: of.embedding.address,
                    EmbeddingRecord.K: self._width,
                    EmbeddingRecord.OUT: self._inputs,
                    EmbeddingRecord.SCALE: float_bits(math.sqrt(spec.layer_input_size)),
                },
            ),
            *products.rows(*self._hidden.read(None, [of.projection])),
            *products.product(of.projection, self._projected, self._width),
            self._table.add(
                add_normed_rows,
                StepWord.TOKEN_CHUNKS,
                {
                    NormedSum.SOURCE: self._projected,
                    NormedSum.K: spec.layer_input_size,
                    NormedSum.PARTS: spec.num_layers,
                    NormedSum.HIDDEN: self._inputs,
                    NormedSum.WEIGHT: of.norm,
                    NormedSum.EPSILON: float_bits(epsilon),
                    NormedSum.SCALE: float_bits(math.sqrt(0.5)),
                    NormedSum.SOURCE_FIRST_WORD: StepWord.ZERO,
                },
            ),
        ]

    def added(
        self, layer: int, of: PackedLayerInput, products: ProductRecords, hidden: HiddenRows
    ) -> list[int]:
        """Gate the inputs of a layer, and add what they give. `hidden`: with the norm of that."""
        size = self._spec.layer_input_size
        return [
            *products.rows(*self._hidden.read(None, [of.gate])),
            *products.product(of.gate, self._gates, size),
            *products.rows(
                gelu_rows_apart,
                [of.output],
                {
                    RowInput.SOURCE: self._gates,
                    RowInput.SOURCE_STRIDE: size,
                    RowInput.UPS: self._inputs + FLOAT_BYTES * layer * size,
                    RowInput.UPS_STRIDE: self._width,
                },
            ),
            *products.added(of.output, hidden),
        ]
