"""A model as a table of operations: which kernel, on what, after what.

    before   rope angles · embedding                                            once a piece
    layer    write:  norm → QKV → biases, norms of heads, rotate, write K and V
             read:   attention → O, added to hidden → norm → gate, up, SiLU · up → down, added
                     (of Qwen3.5 what attention gives is multiplied by the sigmoid of a product)
                     (or a mixture of experts: `expert_records`; of Gemma what is added is
                     normalised before, and the gate is GELU; of EXAONE 4, too, which in turn
                     has no norms before QKV and gate, up)
         or  read:   norm → Q, K, V, Z, B, A → Gated DeltaNet → O, added to hidden → …
                     (LFM2: norm → B, C, X → gated convolution → …; Granite 4: norm → X, B, C, Z, D
                     → Mamba-2 → norm → O, added to hidden → …)
         or  write, read:   attention over latents, `latent_records` → O, added to hidden → …
    after    norm of the rows whose logits are wanted → logits                  once 64 rows
    embed    norm of the rows whose hidden states are wanted                    once 64 rows

A table may hold the last layers of a model alone: then the hidden rows of a step's tokens, which
the embedding would have written, are given.

A step of more tokens than fit the buffers is cut into pieces. In every layer all pieces go through
`write` before any goes through `read`, so a row may attend to what a row of a later piece writes.
States are read and written in `read`, piece after piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.executor.expert_records import ExpertBuffers
from compute_plane.executor.interface import Float32Array
from compute_plane.executor.latent_records import LatentRecords, make_attention
from compute_plane.executor.packed_latents import PackedLatents
from compute_plane.executor.packed_layers import PackedAttention, PackedMlp
from compute_plane.executor.packed_recurrences import PackedMamba2
from compute_plane.executor.product_records import HiddenRows, ProductRecords
from compute_plane.executor.recurrence_records import RecurrenceRecords, rows_width
from compute_plane.executor.row_buffers import RowBuffers
from compute_plane.executor.step_table import StepTable
from compute_plane.executor.token_records import TokenRecords, token_records
from compute_plane.memory.huge_pages import HugePageArena
from compute_plane.model.mamba2 import Mamba2
from kernels.cpu.catalogue import EMBEDDINGS, grouped_rows, normed_rows, plain_rows, sampled_rows
from kernels.cpu.operands import EmbeddingRecord, RowFormat, RowInput
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.executor.packed_layers import (
        PackedLayer,
        PackedMatrix,
        PackedWeights,
    )
    from compute_plane.executor.packed_recurrences import PackedRecurrence
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.memory.state_pool import StatePool
    from compute_plane.model.spec import ModelSpec
    from kernels.cpu.operation import Operation

PIECE_TOKENS: Final = 512
"""Tokens that go through a layer together: their activations stay in the second-level cache."""
LOGITS_ROWS: Final = 64
"""Rows of logits that exist at once; with a vocabulary of 50 000 they take 12 MiB."""
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """Addresses of a layer's records, before and after all keys and values are written."""

    write: tuple[int, ...]
    read: tuple[int, ...]


class LlamaTable:
    """The records of a model and the buffers they work in.

    `max_tokens`: of one step. `before`, `layers`, `after`: addresses of records, in order;
    `prompt_layers`: the layers for pieces of prompt tokens, the same ones unless
    `tells_prompts_apart`. `hidden`: float32 [max_tokens, hidden], of all tokens of a step.
    `embed`: address of the record that normalises those that leave the plane, into `embedded`:
    float32 [LOGITS_ROWS, hidden]. `states`: of models with such layers.
    `logits`: float32 [LOGITS_ROWS, vocabulary]. `scratch_bytes`: what a worker needs. Weights and
    pool, of the same layers, must outlive it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        kv_pool: KvPool,
        *,
        max_tokens: int,
        states: StatePool | None = None,
    ) -> None:
        self.table = StepTable()
        self._arena = HugePageArena("activations")
        self.table.keep(self._arena)
        self._spec = spec
        latents = spec.latents
        self._heads_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        query_size = spec.query_size
        if latents is not None:  # has buffers of its own
            self._heads_width = query_size = 0
        recurrence = spec.recurrence
        own_rows = 0 if recurrence is None else rows_width(recurrence)
        out_size = 0 if recurrence is None else recurrence.out_size
        # Buffers of all tokens of a step come lazily from the system: what is not touched is free.
        self.hidden = self._float_rows(max_tokens, spec.hidden_size)
        self._hidden = self.hidden.ctypes.data
        first_layer = spec.num_layers - len(weights.layers)
        self._projected = self._floats(PIECE_TOKENS * max(self._heads_width, own_rows))
        self._attended = self._floats(PIECE_TOKENS * max(query_size, out_size))
        self._gate_up = self._floats(PIECE_TOKENS * 2 * max(spec.common_mlp_sizes, default=0))
        self.logits = self._float_rows(LOGITS_ROWS, spec.vocab_size)
        widest = max(spec.hidden_size, spec.attended_size, out_size, *spec.common_mlp_sizes)
        if latents is not None:
            widest = max(widest, latents.query_rank)
        rows = RowBuffers(self._arena, PIECE_TOKENS, widest)
        self._attention = make_attention(
            self.table,
            self._arena,
            spec,
            kv_pool,
            first_layer=first_layer,
            max_tokens=max_tokens,
            max_rows=PIECE_TOKENS,
            heads=(self._projected, self._attended),
        )
        rows_of_heads = None
        if isinstance(self._attention, LatentRecords):
            rows_of_heads = self._attention.rows
        self._recurrence = None
        if recurrence is not None and states is not None:
            self._recurrence = RecurrenceRecords(
                self.table,
                self._arena,
                recurrence,
                states,
                first_layer=first_layer,
                max_rows=PIECE_TOKENS,
                rows=self._projected,
                out=self._attended,
            )
        self.before = list(self._attention.before)
        if weights.embedding is not None:
            self.before.append(self._embedding(weights.embedding))
        experts = None
        if spec.mixture is not None:
            experts = ExpertBuffers(self._arena, spec, spec.mixture, PIECE_TOKENS)
        buffers = rows, experts, rows_of_heads
        generated = token_records(self.table, *buffers, of_prompt=False)
        prompt = token_records(self.table, *buffers, of_prompt=True)
        matrices = [matrix for layer in weights.layers for matrix in layer.matrices]
        self.tells_prompts_apart = any(
            generated.products.format_of(matrix) != prompt.products.format_of(matrix)
            for matrix in matrices
        )
        # Records fetch the weights of those added behind them, so generated tokens come last.
        if self.tells_prompts_apart:
            self.prompt_layers = self._layers(weights, prompt)
        self.layers = self._layers(weights, generated)
        if not self.tells_prompts_apart:
            self.prompt_layers = self.layers
        self.after = tuple(self._after(weights, generated.products))
        self.embedded = self._float_rows(LOGITS_ROWS, spec.hidden_size)
        self.embed = self._embed(weights)
        self.scratch_bytes = max(
            self._attention.scratch_bytes,
            0 if self._recurrence is None else self._recurrence.scratch_bytes,
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
                EmbeddingRecord.OUT: self._hidden,
                EmbeddingRecord.SCALE: 0 if scale == 1 else _float_bits(scale),
            },
        )

    def _layers(self, weights: PackedWeights, records: TokenRecords) -> tuple[LayerRecords, ...]:
        return tuple(
            self._layer(index, layer, records) for index, layer in enumerate(weights.layers)
        )

    def _layer(self, index: int, layer: PackedLayer, records: TokenRecords) -> LayerRecords:
        after_mixer, after_mlp = (
            HiddenRows(self._hidden, weight, self._epsilon())
            for weight in layer.output_norms or (None, None)
        )
        write, read = self._mixer_of(index, layer, records, after_mixer)
        return LayerRecords(
            write=tuple(write), read=(*read, *self._feedforward(layer, records, after_mlp))
        )

    def _mixer_of(
        self, index: int, layer: PackedLayer, records: TokenRecords, hidden: HiddenRows
    ) -> tuple[list[int], list[int]]:
        """Return what is to be done before all keys and values are there, and what then."""
        mixer = layer.mixer
        if mixer is None:
            return [], []
        if isinstance(mixer, PackedAttention):
            write, read = self._attention_of(index, layer, mixer, records)
        elif isinstance(mixer, PackedLatents):
            write, read = self._latents_of(index, layer, mixer, records)
        else:
            write, read = [], self._recurrence_of(index, layer, mixer, records.products)
        hidden = replace(hidden, bias=mixer.o_bias)
        return write, [*read, *records.products.added(mixer.o, hidden)]

    def _attention_of(
        self, index: int, layer: PackedLayer, mixer: PackedAttention, records: TokenRecords
    ) -> tuple[list[int], list[int]]:
        """Return what writes keys and values, and what attends, up to the product behind it."""
        products, attention = records.products, self._attention
        if isinstance(attention, LatentRecords):
            raise TypeError("a model with latents has no layers without")
        write = [
            *products.rows(*self._read(layer.attn_norm, mixer.qkv)),
            *products.beside_each_other(mixer.qkv, self._projected, self._heads_width),
            *attention.rope_write(index, mixer, self._epsilon()),
        ]
        read = attention.attend(index, mixer)
        if mixer.gate is not None:  # its rows are the piece's, so they are made when it is read
            width = self._spec.query_size
            read += [
                *products.rows(*self._read(layer.attn_norm, [mixer.gate])),
                *products.product(mixer.gate, self._projected, width),
                attention.gate(self._projected),
            ]
        return write, [*read, *self._attended_rows(mixer.o, self._spec.query_size, products)]

    def _latents_of(
        self, index: int, layer: PackedLayer, mixer: PackedLatents, records: TokenRecords
    ) -> tuple[list[int], list[int]]:
        """Return what writes latents, and what attends, up to the product behind it."""
        products, attention, epsilon = records.products, self._attention, self._epsilon()
        if records.heads is None or not isinstance(attention, LatentRecords):
            raise TypeError("a model without latents has layers with them")

        def read(matrices: Sequence[PackedMatrix]) -> list[int]:
            return products.rows(*self._read(layer.attn_norm, matrices))

        return (
            attention.write(index, mixer, products, read, epsilon),
            attention.attend(index, mixer, products, records.heads, read, epsilon),
        )

    def _recurrence_of(
        self,
        index: int,
        layer: PackedLayer,
        mixer: PackedRecurrence,
        products: ProductRecords,
    ) -> list[int]:
        """Return what lets tokens through their states, up to the product behind."""
        if self._recurrence is None:
            raise ValueError("a model with states needs a pool of them")
        norm = mixer.norm if isinstance(mixer, PackedMamba2) else None
        return [
            *products.rows(*self._read(layer.attn_norm, mixer.inputs)),
            *self._recurrence.run(index, mixer, products, self._epsilon()),
            *self._attended_rows(mixer.o, mixer.o.k, products, norm),
        ]

    def _attended_rows(
        self, o: PackedMatrix, width: int, products: ProductRecords, norm: int | None = None
    ) -> list[int]:
        """Make the rows that a product reads of what a mixer gave. `norm`: Mamba-2's."""
        operands: dict[int, int] = {
            RowInput.SOURCE: self._attended,
            RowInput.SOURCE_STRIDE: width,
        }
        of = self._spec.recurrence
        if norm is None or not isinstance(of, Mamba2):
            return products.rows(plain_rows, [o], operands)
        operands |= {RowInput.WEIGHT: norm, RowInput.EPSILON: _float_bits(of.norm_eps)}
        if of.num_groups == 1:
            return products.rows(normed_rows, [o], operands)
        operands[RowInput.NUM_GROUPS] = of.num_groups
        return products.rows(grouped_rows, [o], operands)

    def _feedforward(
        self, layer: PackedLayer, records: TokenRecords, hidden: HiddenRows
    ) -> list[int]:
        part, products = layer.feedforward, records.products
        if part is None:
            return []
        if isinstance(part, PackedMlp):
            return [
                *products.rows(*self._read(layer.mlp_norm, part.gate_up)),
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
        of_all = () if part.shared is None else part.shared.read
        read = [part.router, *part.first.gate_up, *of_all]
        return [
            *products.rows(*self._read(layer.mlp_norm, read)),
            *records.experts.added(part, self._hidden, self._gate_up),
        ]

    def _after(self, weights: PackedWeights, products: ProductRecords) -> list[int]:
        norm = self._norm_operands(weights.final_norm)
        norm[RowInput.ROWS_WORD] = StepWord.NUM_OUT_ROWS
        return [
            *products.rows(sampled_rows, [weights.lm_head], norm, chunks=StepWord.OUT_CHUNKS),
            *products.of_sampled_rows(
                weights.lm_head, self.logits.ctypes.data, self._spec.vocab_size
            ),
        ]

    def _embed(self, weights: PackedWeights) -> int:
        operands = {
            **self._norm_operands(weights.embedding_norm),
            RowInput.ROWS_WORD: StepWord.NUM_OUT_ROWS,
            RowInput.K: self._spec.hidden_size,
            RowInput.FORMAT: RowFormat.FLOAT32,
            RowInput.OUT: self.embedded.ctypes.data,
        }
        return self.table.add(sampled_rows, StepWord.OUT_CHUNKS, operands)

    def _read(
        self, norm: int | None, matrices: Sequence[PackedMatrix]
    ) -> tuple[Operation, Sequence[PackedMatrix], dict[int, int]]:
        """Return how matrices read hidden rows: normalised, or as they are where there is none."""
        if norm is None:
            return plain_rows, matrices, self._hidden_operands()
        return normed_rows, matrices, self._norm_operands(norm)

    def _hidden_operands(self) -> dict[int, int]:
        return {
            RowInput.SOURCE: self._hidden,
            RowInput.SOURCE_STRIDE: self._spec.hidden_size,
            RowInput.SOURCE_FIRST_WORD: StepWord.FIRST_TOKEN,
        }

    def _norm_operands(self, weight: int) -> dict[int, int]:
        return {
            **self._hidden_operands(),
            RowInput.WEIGHT: weight,
            RowInput.EPSILON: self._epsilon(),
        }

    def _epsilon(self) -> int:
        """Return the bits of the norms' epsilon as float32."""
        return _float_bits(self._spec.rms_norm_eps)

    def _floats(self, count: int) -> int:
        """Return the address of float32 memory that lives as long as the table."""
        return self._arena.take(FLOAT_BYTES * count).ctypes.data

    def _float_rows(self, rows: int, width: int) -> Float32Array:
        """Return float32 memory [rows, width]."""
        return self._arena.take(FLOAT_BYTES * rows * width).view(np.float32).reshape(rows, width)


def _float_bits(value: float) -> int:
    """Return the bits of a float32."""
    return int(np.float32(value).view(np.uint32))
