"""The forward pass of a Llama-family model over one batch of tokens, float32.

In the order of the paper (Touvron et al. 2023), for every layer:

    hidden += O(attention(rope(QKV(norm(hidden)))))        all KV writes before any read
    hidden += Down(silu(Gate(norm(hidden))) · Up(norm(hidden)))

Matrix products go through NumPy's BLAS, everything else through a kernel set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.executor.interface import Float32Array, Int32Array
from compute_plane.executor.matrix_products import MatrixProducts
from compute_plane.model.rope import inverse_frequencies

if TYPE_CHECKING:
    from compute_plane.executor.token_layout import TokenLayout
    from compute_plane.executor.worker_threads import WorkerThreads
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.weights import LlamaWeights
    from kernels.interface import KernelSet

PIECE_TOKENS: Final = 512
"""Tokens that pass through a layer's matrices at once: enough for BLAS to reach its full speed, few
enough to bound the scratch memory whatever the size of the batch."""

SHARES_A_THREAD: Final = 4
"""Ranges of attention items for each thread, so that a quick one can take over from a slow one."""

PARALLEL_MULTIPLIES: Final = 4_000_000
"""Attention of a piece with fewer multiplications runs on the calling thread: it takes less time
than waking another."""


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The weights of one layer, with Q, K, V and gate, up each in one matrix, [out, in]."""

    attn_norm: Float32Array
    qkv: Float32Array
    o: Float32Array
    mlp_norm: Float32Array
    gate_up: Float32Array
    down: Float32Array


class LlamaStep:
    """Weights, pool and scratch arrays of a model; `run` computes one step.

    The weights are copied where matrices are joined; the caller may drop its own.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        kv_pool: KvPool,
        kernels: KernelSet,
        workers: WorkerThreads,
    ) -> None:
        self.spec = spec
        self.kv_pool = kv_pool
        self.kernels = kernels
        self._workers = workers
        self._products = MatrixProducts(workers)
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._lm_head = weights.lm_head
        self._layers = [
            LayerMatrices(
                attn_norm=layer.attn_norm,
                qkv=np.concatenate((layer.q, layer.k, layer.v)),
                o=layer.o,
                mlp_norm=layer.mlp_norm,
                gate_up=np.concatenate((layer.gate, layer.up)),
                down=layer.down,
            )
            for layer in weights.layers
        ]
        self._frequencies = inverse_frequencies(spec)
        self._scale = spec.head_dim**-0.5
        self._scratch: dict[str, Float32Array] = {}

    def run(self, layout: TokenLayout) -> Float32Array:
        """Compute all layers, write the tokens' KV, and return the last hidden states [T, E].

        The result is a scratch array: good until the next call.
        """
        spec, kernels = self.spec, self.kernels
        num_tokens = len(layout.token_ids)
        hidden = self._array("hidden", num_tokens, spec.hidden_size)
        q = self._array("q", num_tokens, spec.num_heads * spec.head_dim)
        queries = q.reshape(num_tokens, spec.num_heads, spec.head_dim)
        kernels.embedding(self._embedding, layout.token_ids, hidden)
        angles = layout.positions.astype(np.float32)[:, None] * self._frequencies
        cosines, sines = np.cos(angles), np.sin(angles)
        pieces = [
            slice(start, min(start + PIECE_TOKENS, num_tokens))
            for start in range(0, num_tokens, PIECE_TOKENS)
        ]
        shares = [self._attention_shares(layout.positions[piece]) for piece in pieces]
        for index, layer in enumerate(self._layers):
            for piece in pieces:
                normed = self._norm(hidden[piece], layer.attn_norm)
                qkv = self._product("qkv", normed, layer.qkv)
                kernels.rope_write_kv(
                    qkv, cosines[piece], sines[piece], self.kv_pool.data, index,
                    layout.kv_slots[piece], queries[piece],
                )  # fmt: skip
            for piece, piece_shares in zip(pieces, shares, strict=True):
                attended = self._attend(index, layout, piece, queries[piece], piece_shares)
                hidden[piece] += self._product("delta", attended, layer.o)
                normed = self._norm(hidden[piece], layer.mlp_norm)
                gate_up = self._product("gate_up", normed, layer.gate_up)
                gated = self._array("gated", len(gate_up), spec.intermediate_size)
                kernels.silu_mul(gate_up, gated)
                hidden[piece] += self._product("delta", gated, layer.down)
        return hidden

    def logits(self, hidden: Float32Array) -> Float32Array:
        """Return the logits [R, V] of hidden states [R, E]; a scratch array."""
        return self._product("logits", self._norm(hidden, self._final_norm), self._lm_head)

    def _norm(self, x: Float32Array, weight: Float32Array) -> Float32Array:
        """Return `x` [T, E] normalised, in scratch."""
        out = self._array("normed", *x.shape)
        self.kernels.rms_norm(x, weight, self.spec.rms_norm_eps, out)
        return out

    def _product(self, name: str, x: Float32Array, weight: Float32Array) -> Float32Array:
        """Return x·weightᵀ in the scratch array `name`."""
        out = self._array(name, len(x), len(weight))
        self._products.linear(x, weight, out)
        return out

    def _attend(
        self,
        layer: int,
        layout: TokenLayout,
        piece: slice,
        queries: Float32Array,
        shares: list[tuple[int, int]],
    ) -> Float32Array:
        """Return the attention of a piece's tokens, [T, H·D], each share on its own thread."""
        attended = self._array("attended", len(queries), queries.shape[1] * queries.shape[2])

        def task(first_item: int, end_item: int) -> None:
            self.kernels.paged_attention(
                queries, self.kv_pool.data, layer, layout.block_tables, layout.token_rows[piece],
                layout.positions[piece], self._scale, first_item, end_item,
                attended.reshape(queries.shape),
            )  # fmt: skip

        self._workers.run([partial(task, *share) for share in shares])
        return attended

    def _attention_shares(self, positions: Int32Array) -> list[tuple[int, int]]:
        """Cut the attention items of a piece's tokens into ranges of equal work."""
        num_kv_heads = self.spec.num_kv_heads
        work = np.cumsum(np.repeat(positions.astype(np.int64) + 1, num_kv_heads))
        multiplies = int(work[-1]) * 2 * self.spec.num_heads // num_kv_heads * self.spec.head_dim
        num_threads = self._workers.num_threads
        if num_threads == 1 or multiplies < PARALLEL_MULTIPLIES:
            return [(0, len(work))]
        num_shares = num_threads * SHARES_A_THREAD
        cuts = np.searchsorted(work, work[-1] * np.arange(1, num_shares) / num_shares) + 1
        bounds = [0, *(int(cut) for cut in cuts), len(work)]
        return [(a, b) for a, b in pairwise(bounds) if a < b]

    def _array(self, name: str, rows: int, width: int) -> Float32Array:
        """Return [rows, width] of the scratch array `name`, which grows when it must."""
        array = self._scratch.get(name)
        if array is None or len(array) < rows:
            array = np.empty((rows, width), dtype=np.float32)
            self._scratch[name] = array
        return array[:rows]
