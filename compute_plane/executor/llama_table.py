"""A model as a table of operations: which kernel, on what, after what.

    before   rope angles · embedding                                            once a piece
    layer    write:  norm → QKV → biases, norms of heads, rotate, write K and V
             read:   attention → O, added to hidden → norm → gate, up, SiLU · up → down, added
                     (or a mixture of experts: `expert_records`; of Gemma what is added is
                     normalised before, and the gate is GELU; of EXAONE 4, too, which in turn
                     has no norms before QKV and gate, up)
    after    norm of the rows whose logits are wanted → logits                  once 64 rows
    embed    norm of the rows whose hidden states are wanted                    once 64 rows

A table may hold the last layers of a model alone: then the hidden rows of a step's tokens, which
the embedding would have written, are given.

A step of more tokens than fit the buffers is cut into pieces. In every layer all pieces go through
`write` before any goes through `read`, so a row may attend to what a row of a later piece writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.executor.expert_records import ExpertBuffers, TokenRecords, token_records
from compute_plane.executor.interface import Float32Array
from compute_plane.executor.packed_layers import PackedMlp
from compute_plane.executor.product_records import HiddenRows, ProductRecords
from compute_plane.executor.row_buffers import RowBuffers
from compute_plane.executor.step_table import StepTable
from compute_plane.memory.huge_pages import HugePageArena
from compute_plane.model.rope import (
    attention_factors,
    inverse_frequencies,
    local_rope,
    query_growth,
    score_factor,
)
from kernels.cpu.attention_items import MAX_SHARED_ITEMS, rows_per_item
from kernels.cpu.attention_sizes import (
    attention_partial_floats,
    attention_scratch_bytes,
    rope_scratch_bytes,
)
from kernels.cpu.catalogue import (
    ATTENTION,
    EMBEDDINGS,
    ROPE_WRITE,
    merge_attention,
    normed_rows,
    plain_rows,
    rope_angles,
    sampled_rows,
)
from kernels.cpu.operands import (
    Attention,
    EmbeddingRecord,
    RopeAngles,
    RopeWrite,
    RowFormat,
    RowInput,
)
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.executor.packed_layers import PackedLayer, PackedMatrix, PackedWeights
    from compute_plane.memory.kv_pool import KvPool
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
    float32 [LOGITS_ROWS, hidden].
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
    ) -> None:
        self.table = StepTable()
        self._arena = HugePageArena("activations")
        self.table.keep(self._arena)
        self._spec = spec
        self._pool = kv_pool
        heads = spec.num_heads + 2 * spec.num_kv_heads
        half = spec.head_dim // 2
        # Buffers of all tokens of a step come lazily from the system: what is not touched is free.
        self.hidden = self._float_rows(max_tokens, spec.hidden_size)
        self._hidden = self.hidden.ctypes.data
        self._queries = self._floats(max_tokens * spec.query_size)
        self._angles = self._floats(max_tokens * half), self._floats(max_tokens * half)
        self._growth = self._growth_of(spec)
        self._no_angles = self._angles
        self._local_angles = self._angles
        self._first_layer = spec.num_layers - len(weights.layers)
        if spec.layers_without_rope:
            cosines, sines = (self._float_rows(max_tokens, half) for _ in range(2))
            cosines.fill(score_factor(spec))
            self._no_angles = cosines.ctypes.data, sines.ctypes.data
        self._qkv = self._floats(PIECE_TOKENS * heads * spec.head_dim)
        self._attended = self._floats(PIECE_TOKENS * spec.query_size)
        self._partials = self._floats(
            MAX_SHARED_ITEMS * attention_partial_floats(spec.num_heads, spec.head_dim)
        )
        self._gate_up = self._floats(PIECE_TOKENS * 2 * max(spec.common_mlp_sizes, default=0))
        self.logits = self._float_rows(LOGITS_ROWS, spec.vocab_size)
        widest = max(spec.hidden_size, spec.query_size, *spec.common_mlp_sizes)
        rows = RowBuffers(self._arena, PIECE_TOKENS, widest)
        group = spec.num_heads // spec.num_kv_heads
        self.before = [self._rope_angles(spec, self._angles)]
        if spec.layers_with_local_rope:
            self._local_angles = self._floats(max_tokens * half), self._floats(max_tokens * half)
            self.before.append(self._rope_angles(local_rope(spec), self._local_angles))
        if weights.embedding is not None:
            self.before.append(self._embedding(weights.embedding))
        experts = None
        if spec.mixture is not None:
            experts = ExpertBuffers(self._arena, spec, spec.mixture, PIECE_TOKENS)
        generated = token_records(self.table, rows, experts, of_prompt=False)
        prompt = token_records(self.table, rows, experts, of_prompt=True)
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
            rope_scratch_bytes(spec.head_dim),
            attention_scratch_bytes(spec.head_dim, rows_per_item(group)),
            generated.scratch_bytes,
            prompt.scratch_bytes,
        )

    # --- the parts ---

    def _growth_of(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the address of the factors by which queries grow, and for how many positions."""
        growth = query_growth(spec)
        if growth is None:
            return 0, 0
        self.table.keep(growth[0])
        return growth[0].ctypes.data, growth[1]

    def _rope_angles(self, spec: ModelSpec, angles: tuple[int, int]) -> int:
        frequencies, factors = inverse_frequencies(spec), attention_factors(spec)
        self.table.keep(frequencies)
        self.table.keep(factors)
        return self.table.add(
            rope_angles,
            StepWord.TOKEN_CHUNKS,
            {
                RopeAngles.FREQUENCIES: frequencies.ctypes.data,
                RopeAngles.COSINES: angles[0],
                RopeAngles.SINES: angles[1],
                RopeAngles.HALF: spec.head_dim // 2,
                RopeAngles.FACTORS: factors.ctypes.data,
            },
        )

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
        spec, products = self._spec, records.products
        heads_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        rows = products.rows
        after_attention, after_mlp = (
            HiddenRows(self._hidden, weight, self._epsilon())
            for weight in layer.output_norms or (None, None)
        )
        after_attention = replace(after_attention, bias=layer.o_bias)
        attended: dict[int, int] = {
            RowInput.SOURCE: self._attended,
            RowInput.SOURCE_STRIDE: spec.query_size,
        }
        return LayerRecords(
            write=(
                *rows(*self._read(layer.attn_norm, layer.qkv)),
                *products.beside_each_other(layer.qkv, self._qkv, heads_width),
                self._rope_write(index, layer),
            ),
            read=(
                *self._attention(index, layer),
                *rows(plain_rows, [layer.o], attended),
                *products.added(layer.o, after_attention),
                *self._feedforward(layer, records, after_mlp),
            ),
        )

    def _feedforward(
        self, layer: PackedLayer, records: TokenRecords, hidden: HiddenRows
    ) -> list[int]:
        part, products = layer.feedforward, records.products
        if isinstance(part, PackedMlp):
            return [
                *products.rows(*self._read(layer.mlp_norm, part.gate_up)),
                *products.gated(
                    part.gate_up,
                    part.down,
                    self._gate_up,
                    hidden,
                    by_gelu=self._spec.activation == "gelu",
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

    # --- attention ---

    def _layer_address(self, index: int) -> int:
        return self._pool.address + index * self._pool.layout.layer_bytes

    def _angles_of(self, layer: int) -> tuple[int, int]:
        """Return the addresses of the cosines and sines by which a layer's heads turn."""
        if layer in self._spec.layers_without_rope:
            return self._no_angles
        is_local = layer in self._spec.layers_with_local_rope
        return self._local_angles if is_local else self._angles

    def _rope_write(self, index: int, layer: PackedLayer) -> int:
        spec, layout = self._spec, self._pool.layout
        query_norm, key_norm = layer.head_norms or (0, 0)
        cosines, sines = self._angles_of(self._first_layer + index)
        return self.table.add(
            ROPE_WRITE[layout.dtype],
            StepWord.TOKEN_CHUNKS,
            {
                RopeWrite.QKV: self._qkv,
                RopeWrite.COSINES: cosines,
                RopeWrite.SINES: sines,
                RopeWrite.QUERIES: self._queries,
                RopeWrite.POOL: self._layer_address(index),
                RopeWrite.BLOCK_BYTES: layout.block_bytes,
                RopeWrite.HEAD_BYTES: layout.head_bytes,
                RopeWrite.BLOCK_SIZE: layout.block_size,
                RopeWrite.HEAD_DIM: spec.head_dim,
                RopeWrite.NUM_HEADS: spec.num_heads,
                RopeWrite.NUM_KV_HEADS: spec.num_kv_heads,
                RopeWrite.BIAS: layer.qkv_bias or 0,
                RopeWrite.QUERY_NORM: query_norm,
                RopeWrite.KEY_NORM: key_norm,
                RopeWrite.EPSILON: self._epsilon(),
                RopeWrite.GROWTH: self._growth[0],
                RopeWrite.GROWTH_LENGTH: self._growth[1],
            },
        )

    def _attention(self, index: int, layer: PackedLayer) -> list[int]:
        """Attend; then merge what threads found in parts of one context, if they shared any."""
        spec, layout = self._spec, self._pool.layout
        operands: dict[int, int] = {
            Attention.QUERIES: self._queries,
            Attention.OUT: self._attended,
            Attention.POOL: self._layer_address(index),
            Attention.BLOCK_BYTES: layout.block_bytes,
            Attention.HEAD_BYTES: layout.head_bytes,
            Attention.BLOCK_SIZE: layout.block_size,
            Attention.HEAD_DIM: spec.head_dim,
            Attention.NUM_HEADS: spec.num_heads,
            Attention.NUM_KV_HEADS: spec.num_kv_heads,
            Attention.PARTIALS: self._partials,
            Attention.WINDOW: spec.window_of(self._first_layer + index) or 0,
            Attention.SINKS: layer.sinks or 0,
        }
        return [
            self.table.add(ATTENTION[layout.dtype], StepWord.ATTENTION_CHUNKS, operands),
            self.table.add(merge_attention, StepWord.MERGE_CHUNKS, operands),
        ]

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
