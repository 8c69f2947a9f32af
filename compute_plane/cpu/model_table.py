"""A model as a table of operations: which kernel, on what, after what.

    before   rope angles · embedding                                            once a piece
    layer    write, read: what lets a token see those before it, `mixer_records`
             read: norm → gate, up, SiLU · up → down, added to hidden
             (or a mixture of experts: `expert_records`; of Gemma what is added is normalised
             before, and the gate is GELU; of EXAONE 4, too, which in turn has no norms before QKV
             and gate, up; of Gemma 4 a gated part of a second embedding behind that,
             `layer_input_records`)
    after    norm → logits, of the rows where they are wanted: `logits_records`

A table may hold the last layers of a model alone: then the hidden rows of a step's tokens, which
the embedding would have written, are given.

A step of more tokens than fit the buffers is cut into pieces. In every layer all pieces go through
`write` before any goes through `read`, so a row may attend to what a row of a later piece writes.
States are read and written in `read`, piece after piece; where attention has one beside it, in
`write`.

Once the last keys and values are written, nothing that comes later reads what is made of a token
but its own output. So those tokens alone whose output is wanted go on from there, as pieces of
their own behind all others (`LateRecords`): of a prompt the last token. That leaves out most of the
last layer, and all those behind it that have no keys and values of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.adapter_records import AdapterRecords
from compute_plane.cpu.expert_buffers import ExpertBuffers
from compute_plane.cpu.hidden_reads import HiddenReads
from compute_plane.cpu.layer_input_records import LayerInputRecords
from compute_plane.cpu.logits_records import LogitsRecords
from compute_plane.cpu.mixer_records import MixerRecords
from compute_plane.cpu.packed_layers import PackedMlp
from compute_plane.cpu.pieces import PIECE_TOKENS
from compute_plane.cpu.product_records import HiddenRows, float_bits
from compute_plane.cpu.row_buffers import RowBuffers
from compute_plane.cpu.step_table import StepTable
from compute_plane.cpu.token_records import TokenRecords, token_records
from compute_plane.memory.huge_pages import HugePageArena
from compute_plane.model.late_layers import first_late_layer
from kernels.cpu.catalogue import EMBEDDINGS, take_rows
from kernels.cpu.operands import EmbeddingRecord, TakenRows
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cpu.packed_adapters import PackedAdapters
    from compute_plane.cpu.packed_layers import (
        PackedLayer,
        PackedMatrix,
        PackedWeights,
    )
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.memory.state_pool import StatePool
    from compute_plane.model.spec import ModelSpec

FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """Addresses of a layer's records, before and after all keys and values are written."""

    write: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LateRecords:
    """How tokens go on alone once all have been through `write` of layer `first`.

    `before`: addresses of what a piece of them needs once. Their rows are copies of those of
    StepWord.TAKEN_TOKENS; FIRST_TOKEN is behind all others.
    """

    first: int
    before: tuple[int, ...]


class ModelTable:
    """The records of a model and the buffers they work in.

    `max_tokens`: of one step. `before`, `layers`: addresses of records, in order; `prompt_layers`:
    the layers for pieces of prompt tokens, the same ones unless `tells_prompts_apart`.
    `layers_of_kinds`: by `PieceKind`, those with adapters where there are any. `late`: None
    where a state alone is the last that tokens leave. `ends`: what comes behind them. `hidden`:
    float32 [tokens, hidden], of all tokens of a step. `states`: of models with such layers.
    `adapters`: that tokens may be computed with; they must outlive it, too.
    `num_slots`: of `MixerRecords`. `scratch_bytes`: what a worker needs. Weights and pool, of the
    same layers, must outlive it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        kv_pool: KvPool,
        *,
        max_tokens: int,
        states: StatePool | None = None,
        adapters: PackedAdapters | None = None,
    ) -> None:
        self.table = StepTable()
        self._arena = HugePageArena("activations")
        self.table.keep(self._arena)
        self._spec = spec
        self._first_layer = spec.num_layers - len(weights.layers)
        first_late = first_late_layer(spec, self._first_layer)
        # Buffers of all tokens of a step come lazily from the system: what is not touched is free.
        step_rows = max_tokens if first_late is None else 2 * max_tokens
        memory = self._arena.take(FLOAT_BYTES * step_rows * spec.hidden_size)
        self.hidden = memory.view(np.float32).reshape(step_rows, spec.hidden_size)
        self._hidden = HiddenReads(spec, self.hidden.ctypes.data)
        widest_mlp = max(spec.common_mlp_sizes, default=0)
        sums = self._arena.take(FLOAT_BYTES * PIECE_TOKENS * 2 * widest_mlp)
        self._gate_up = sums.ctypes.data
        self._mixers = MixerRecords(
            self.table,
            self._arena,
            spec,
            kv_pool,
            first_layer=self._first_layer,
            step_rows=step_rows,
            states=states,
            hidden=self._hidden,
        )
        self.before = list(self._mixers.before)
        self.num_slots = self._mixers.num_slots
        if weights.embedding is not None:
            self.before.append(self._embedding(weights.embedding))
        widest = max(spec.hidden_size, self._mixers.widest, widest_mlp, spec.layer_input_size)
        experts = None
        if spec.mixture is not None:
            experts = ExpertBuffers(self._arena, spec, spec.mixture, PIECE_TOKENS, step_rows)
        rows = RowBuffers(self._arena, PIECE_TOKENS, widest)
        buffers = rows, experts, self._mixers.rows_of_heads
        generated = token_records(self.table, *buffers, of_prompt=False)
        prompt = token_records(self.table, *buffers, of_prompt=True)
        matrices = [matrix for layer in weights.layers for matrix in layer.matrices]
        self.tells_prompts_apart = any(
            generated.products.format_of(matrix) != prompt.products.format_of(matrix)
            for matrix in matrices
        )
        self._inputs = None
        if weights.layer_inputs is not None:
            self._inputs = LayerInputRecords(
                self.table,
                self._arena,
                spec,
                step_rows=step_rows,
                hidden=self._hidden,
            )
            self.before += self._inputs.before(weights.layer_inputs, generated.products)
        self.late = None if first_late is None else self._late(first_late)
        # Records fetch the weights of those added behind them, so generated tokens come last.
        adapted = self._adapted_layers(weights, buffers, adapters)
        if self.tells_prompts_apart:
            self.prompt_layers = self._layers(weights, prompt)
        self.layers = self._layers(weights, generated)
        if not self.tells_prompts_apart:
            self.prompt_layers = self.layers
        self.layers_of_kinds = (self.layers, self.prompt_layers, *adapted)
        self.ends = LogitsRecords(
            self.table, self._arena, spec, weights, generated.products, hidden=self._hidden
        )
        self.scratch_bytes = max(
            self._mixers.scratch_bytes,
            self._adapted_scratch_bytes,
            generated.scratch_bytes,
            prompt.scratch_bytes,
        )

    # --- the parts ---

    def _embedding(self, matrix: PackedMatrix) -> int:
        scale = self._spec.embedding_scale
        return self.table.add(
            EMBEDDINGS[matrix.format],
            StepWord.TOKEN_CHUNKS,
            {
                EmbeddingRecord.WEIGHTS: matrix.address,
                EmbeddingRecord.K: matrix.k,
                EmbeddingRecord.OUT: self._hidden.address,
                EmbeddingRecord.SCALE: 0 if scale == 1 else float_bits(scale),
            },
        )

    def _late(self, first_late: int) -> LateRecords:
        """Return how tokens go on alone; `first_late`: behind `write` of which of the layers."""
        taken = [(self._hidden.address, self._spec.hidden_size)]
        taken += [] if self._inputs is None else [self._inputs.rows]
        taken += self._mixers.rows_between(first_late)
        before = [
            self.table.add(
                take_rows,
                StepWord.TOKEN_CHUNKS,
                {TakenRows.ROWS: address, TakenRows.ROW_BYTES: FLOAT_BYTES * width},
            )
            for address, width in taken
        ]
        return LateRecords(first_late, (*before, *self._mixers.before))

    def _adapted_layers(
        self,
        weights: PackedWeights,
        buffers: tuple[RowBuffers, ExpertBuffers | None, RowBuffers | None],
        adapters: PackedAdapters | None,
    ) -> tuple[tuple[LayerRecords, ...], ...]:
        """Return the layers for pieces with adapters: of generated tokens, and of prompts."""
        self._adapted_scratch_bytes = 0
        if adapters is None:
            return ()
        added = AdapterRecords(self.table, buffers[0], adapters)
        prompt, generated = (
            token_records(self.table, *buffers, added, of_prompt=of_prompt)
            for of_prompt in (True, False)
        )
        of_prompts = self._layers(weights, prompt) if self.tells_prompts_apart else None
        layers = self._layers(weights, generated)
        self._adapted_scratch_bytes = max(generated.scratch_bytes, prompt.scratch_bytes)
        return layers, of_prompts or layers

    def _layers(self, weights: PackedWeights, records: TokenRecords) -> tuple[LayerRecords, ...]:
        return tuple(
            self._layer(index, layer, records) for index, layer in enumerate(weights.layers)
        )

    def _layer(self, index: int, layer: PackedLayer, records: TokenRecords) -> LayerRecords:
        hidden = HiddenRows(self._hidden.address, epsilon=self._hidden.epsilon)
        of_mixer, of_mlp = layer.output_norms or (None, None)
        after_mlp = replace(hidden, norm=of_mlp, scale=layer.scale)
        behind: list[int] = []
        if layer.layer_input is not None and self._inputs is not None:
            after_mlp = replace(hidden, norm=of_mlp)
            after_input = replace(hidden, norm=layer.layer_input.output_norm, scale=layer.scale)
            behind = self._inputs.added(
                self._first_layer + index, layer.layer_input, records.products, after_input
            )
        write, read = self._mixers.added(index, layer, records, replace(hidden, norm=of_mixer))
        feedforward = self._feedforward(layer, records, after_mlp)
        return LayerRecords(write=tuple(write), read=(*read, *feedforward, *behind))

    def _feedforward(
        self, layer: PackedLayer, records: TokenRecords, hidden: HiddenRows
    ) -> list[int]:
        part, products = layer.feedforward, records.products
        if part is None:
            return []
        if isinstance(part, PackedMlp):
            return [
                *products.rows(*self._hidden.read(layer.mlp_norm, part.gate_up)),
                *products.gated(
                    part.gate_up,
                    part.down,
                    self._gate_up,
                    hidden,
                    activation=self._spec.activation,
                ),
            ]
        if records.experts is None:
            raise ValueError("a model without a mixture has layers with experts")
        if part.norms is not None:

            def made(norm: int | None, matrices: Sequence[PackedMatrix]) -> list[int]:
                return products.rows(*self._hidden.read(norm, matrices))

            return records.experts.added_normed(
                part, part.norms, hidden, self._gate_up, made, layer.mlp_norm
            )
        of_all = () if part.shared is None else part.shared.read
        read = [part.router, *part.first.gate_up, *of_all]
        return [
            *products.rows(*self._hidden.read(layer.mlp_norm, read)),
            *records.experts.added(part, self._hidden.address, self._gate_up),
        ]
