"""A Llama-family model as a table of operations: which kernel, on what, after what.

    before   rope angles · embedding                                            once a piece
    layer    write:  norm → QKV → rotate, write K and V
             read:   attention → O, added to hidden → norm → gate, up → SiLU · up → down, added
    after    norm of the rows whose logits are wanted → logits                  once 64 rows

A step of more tokens than fit the buffers is cut into pieces. In every layer all pieces go through
`write` before any goes through `read`, so a row may attend to what a row of a later piece writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.executor.row_buffers import RowBuffers, product_of, row_format_of
from compute_plane.executor.step_table import StepTable
from compute_plane.memory.huge_pages import huge_page_array
from compute_plane.model.rope import inverse_frequencies
from kernels.cpu.attention import (
    ATTENTION,
    attention_partial_floats,
    attention_scratch_bytes,
    merge_attention,
)
from kernels.cpu.attention_context import Attention
from kernels.cpu.attention_items import MAX_SHARED_ITEMS, rows_per_item
from kernels.cpu.embedding import EMBEDDINGS, EmbeddingRecord
from kernels.cpu.matrix_product import Product
from kernels.cpu.operation import Operation, StepWord
from kernels.cpu.rope_write import (
    ROPE_WRITE,
    RopeAngles,
    RopeWrite,
    rope_angles,
    rope_scratch_bytes,
)
from kernels.cpu.row_inputs import RowInput, gated_rows, normed_rows, plain_rows, sampled_rows

if TYPE_CHECKING:
    from compute_plane.executor.packed_weights import PackedLayer, PackedMatrix, PackedWeights
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.model.spec import ModelSpec

PIECE_TOKENS: Final = 512
"""Tokens that go through a layer together: their activations stay in the second-level cache."""
LOGITS_ROWS: Final = 64
"""Rows of logits that exist at once; with a vocabulary of 50 000 they take 12 MiB."""
FLOAT_BYTES: Final = 4
CHUNK_WEIGHTS: Final = 32 * 1024
"""Weights of a chunk of a product, about: a microsecond or two of one row."""
MOST_PRODUCT_CHUNKS: Final = 64


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """Addresses of a layer's records, before and after all keys and values are written."""

    write: tuple[int, ...]
    read: tuple[int, ...]


class LlamaTable:
    """The records of a model and the buffers they work in.

    `max_tokens`: of one step. `on_compiled`: as for `StepTable`. `before`, `layers`, `after`:
    addresses of records, in order. `logits`: float32 [LOGITS_ROWS, vocabulary]. `scratch_bytes`:
    what a worker needs. Weights and pool must outlive it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        kv_pool: KvPool,
        *,
        max_tokens: int,
        on_compiled: Callable[[str], None] | None = None,
    ) -> None:
        self.table = StepTable(on_compiled)
        self._spec = spec
        self._pool = kv_pool
        heads = spec.num_heads + 2 * spec.num_kv_heads
        half = spec.head_dim // 2
        # Buffers of all tokens of a step come lazily from the system: what is not touched is free.
        self._hidden = self._floats(max_tokens * spec.hidden_size)
        self._queries = self._floats(max_tokens * spec.query_size)
        self._cosines, self._sines = (self._floats(max_tokens * half) for _ in range(2))
        self._qkv = self._floats(PIECE_TOKENS * heads * spec.head_dim)
        self._attended = self._floats(PIECE_TOKENS * spec.query_size)
        self._partials = self._floats(
            MAX_SHARED_ITEMS * attention_partial_floats(spec.num_heads, spec.head_dim)
        )
        self._gate_up = self._floats(PIECE_TOKENS * 2 * spec.intermediate_size)
        self.logits = (
            huge_page_array(FLOAT_BYTES * LOGITS_ROWS * spec.vocab_size, purpose="logits")
            .view(np.float32)
            .reshape(LOGITS_ROWS, spec.vocab_size)
        )
        widest = max(spec.hidden_size, spec.query_size, spec.intermediate_size)
        self._rows = RowBuffers(self.table, PIECE_TOKENS, widest)
        group = spec.num_heads // spec.num_kv_heads
        self.scratch_bytes = max(
            rope_scratch_bytes(spec.head_dim),
            attention_scratch_bytes(spec.head_dim, rows_per_item(group)),
        )
        self.before = (self._rope_angles(), self._embedding(weights.embedding))
        self.layers = tuple(self._layer(index, layer) for index, layer in enumerate(weights.layers))
        self.after = tuple(self._after(weights))

    # --- the parts ---

    def _rope_angles(self) -> int:
        frequencies = np.ascontiguousarray(inverse_frequencies(self._spec), dtype=np.float32)
        self.table.keep(frequencies)
        return self.table.add(
            rope_angles,
            StepWord.TOKEN_CHUNKS,
            {
                RopeAngles.FREQUENCIES: frequencies.ctypes.data,
                RopeAngles.COSINES: self._cosines,
                RopeAngles.SINES: self._sines,
                RopeAngles.HALF: self._spec.head_dim // 2,
            },
        )

    def _embedding(self, matrix: PackedMatrix) -> int:
        return self.table.add(
            EMBEDDINGS[matrix.format],
            StepWord.TOKEN_CHUNKS,
            {
                EmbeddingRecord.WEIGHTS: matrix.address,
                EmbeddingRecord.K: matrix.k,
                EmbeddingRecord.OUT: self._hidden,
            },
        )

    def _layer(self, index: int, layer: PackedLayer) -> LayerRecords:
        spec = self._spec
        heads_width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return LayerRecords(
            write=(
                *self._normed(layer.attn_norm, layer.qkv),
                *self._products(layer.qkv, self._qkv, heads_width),
                self._rope_write(index),
            ),
            read=(
                *self._attention(index),
                *self._plain(self._attended, layer.o),
                self._added(layer.o),
                *self._normed(layer.mlp_norm, layer.gate_up),
                *self._products(layer.gate_up, self._gate_up, 2 * spec.intermediate_size),
                *self._gated(layer.down),
                self._added(layer.down),
            ),
        )

    def _after(self, weights: PackedWeights) -> list[int]:
        spec = self._spec
        norm = self._norm_operands(weights.final_norm)
        norm[RowInput.ROWS_WORD] = StepWord.NUM_OUT_ROWS
        rows = self._row_inputs(sampled_rows, [weights.lm_head], StepWord.OUT_CHUNKS, norm)
        logits = self._product(
            weights.lm_head,
            self.logits.ctypes.data,
            spec.vocab_size,
            rows_word=StepWord.NUM_OUT_ROWS,
        )
        return [*rows, logits]

    # --- attention ---

    def _layer_address(self, index: int) -> int:
        return self._pool.address + index * self._pool.layout.layer_bytes

    def _rope_write(self, index: int) -> int:
        spec, layout = self._spec, self._pool.layout
        return self.table.add(
            ROPE_WRITE[layout.dtype],
            StepWord.TOKEN_CHUNKS,
            {
                RopeWrite.QKV: self._qkv,
                RopeWrite.COSINES: self._cosines,
                RopeWrite.SINES: self._sines,
                RopeWrite.QUERIES: self._queries,
                RopeWrite.POOL: self._layer_address(index),
                RopeWrite.BLOCK_BYTES: layout.block_bytes,
                RopeWrite.HEAD_BYTES: layout.head_bytes,
                RopeWrite.BLOCK_SIZE: layout.block_size,
                RopeWrite.HEAD_DIM: spec.head_dim,
                RopeWrite.NUM_HEADS: spec.num_heads,
                RopeWrite.NUM_KV_HEADS: spec.num_kv_heads,
            },
        )

    def _attention(self, index: int) -> list[int]:
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
        }
        return [
            self.table.add(ATTENTION[layout.dtype], StepWord.ATTENTION_CHUNKS, operands),
            self.table.add(merge_attention, StepWord.MERGE_CHUNKS, operands),
        ]

    # --- rows for products, and products ---

    def _norm_operands(self, weight: int) -> dict[int, int]:
        epsilon = np.array([self._spec.rms_norm_eps], dtype=np.float32)
        return {
            RowInput.SOURCE: self._hidden,
            RowInput.SOURCE_STRIDE: self._spec.hidden_size,
            RowInput.SOURCE_FIRST_WORD: StepWord.FIRST_TOKEN,
            RowInput.WEIGHT: weight,
            RowInput.EPSILON: int(epsilon.view(np.uint32)[0]),
        }

    def _normed(self, weight: int, matrices: Sequence[PackedMatrix]) -> list[int]:
        return self._row_inputs(
            normed_rows, matrices, StepWord.TOKEN_CHUNKS, self._norm_operands(weight)
        )

    def _plain(self, source: int, matrix: PackedMatrix) -> list[int]:
        operands: dict[int, int] = {RowInput.SOURCE: source, RowInput.SOURCE_STRIDE: matrix.k}
        return self._row_inputs(plain_rows, [matrix], StepWord.TOKEN_CHUNKS, operands)

    def _gated(self, matrix: PackedMatrix) -> list[int]:
        operands: dict[int, int] = {
            RowInput.SOURCE: self._gate_up,
            RowInput.SOURCE_STRIDE: 2 * matrix.k,
        }
        return self._row_inputs(gated_rows, [matrix], StepWord.TOKEN_CHUNKS, operands)

    def _row_inputs(
        self,
        maker: Operation,
        matrices: Sequence[PackedMatrix],
        chunks: StepWord,
        operands: dict[int, int],
    ) -> list[int]:
        """Make the rows that some matrices read, once for each format of rows among them."""
        formats = dict.fromkeys(row_format_of(matrix.format) for matrix in matrices)
        shared: dict[int, int] = {
            RowInput.SOURCE_FIRST_WORD: StepWord.ZERO,
            RowInput.ROWS_WORD: StepWord.NUM_TOKENS,
            RowInput.K: matrices[0].k,
        }
        return [
            self.table.add(maker, chunks, {**shared, **operands, **self._rows.written(row_format)})
            for row_format in formats
        ]

    def _products(self, matrices: Sequence[PackedMatrix], out: int, stride: int) -> list[int]:
        """Multiply with matrices whose columns lie beside each other in OUT."""
        return [
            self._product(matrix, out + FLOAT_BYTES * matrix.first_column, stride)
            for matrix in matrices
        ]

    def _added(self, matrix: PackedMatrix) -> int:
        """Multiply and add to the hidden states."""
        return self._product(
            matrix, self._hidden, matrix.n, first_word=StepWord.FIRST_TOKEN, is_added=True
        )

    def _product(
        self,
        matrix: PackedMatrix,
        out: int,
        stride: int,
        *,
        rows_word: StepWord = StepWord.NUM_TOKENS,
        first_word: StepWord = StepWord.ZERO,
        is_added: bool = False,
    ) -> int:
        operation, scratch_bytes, width = product_of(matrix.format, matrix.k)
        self.scratch_bytes = max(self.scratch_bytes, scratch_bytes)
        num_chunks = min(MOST_PRODUCT_CHUNKS, matrix.n * matrix.k // CHUNK_WEIGHTS)
        return self.table.add(
            operation,
            max(1, min(num_chunks, -(-matrix.n // width))),
            {
                **self._rows.read(row_format_of(matrix.format)),
                Product.WEIGHTS: matrix.address,
                Product.K: matrix.k,
                Product.N: matrix.n,
                Product.OUT: out,
                Product.OUT_STRIDE: stride,
                Product.ACCUMULATE: int(is_added),
                Product.ROWS_WORD: rows_word,
                Product.OUT_FIRST_WORD: first_word,
            },
            reads=(matrix.address, matrix.num_bytes),
        )

    def _floats(self, count: int) -> int:
        """Return the address of float32 memory that lives as long as the table."""
        memory = huge_page_array(FLOAT_BYTES * count, purpose="activations")
        self.table.keep(memory)
        return memory.ctypes.data
