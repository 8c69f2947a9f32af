"""The kernels through which a layer's heads go: rotated and written, and both kinds of attention.

Scratch comes from torch's allocator at every call; in a captured graph it is the graph's own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.operands import (
    PLAIN,
    UNCHANGED,
    HeadChanges,
    LayerAttention,
    PrefillRows,
)
from compute_plane.model.rope import query_growth
from kernels.cuda.attention_chunks import num_tickets
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import LOG2_E, NO_WINDOW
from kernels.cuda.joint_norms import JointNormsVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant

if TYPE_CHECKING:
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant


class AttentionKernels:
    """The part of `KernelOperations` that reads and writes the pool of keys and values.

    `dtype`: of a step, by name; `kv_dtype`: of the pool, None where it is the same. Raises
    UnsupportedVariantError for a shape that they are not written for.
    """

    def __init__(
        self,
        launcher: Launcher,
        spec: ModelSpec,
        dtype: str,
        block_size: int,
        kv_dtype: str | None,
    ) -> None:
        self._launcher = launcher
        has_float32_norms = spec.norms_begin_at_one and dtype != "float32"
        has_own_norms = spec.has_head_norms and not spec.norms_heads_together
        self._joint_norms: JointNormsVariant | None = None
        if spec.norms_heads_together:
            self._joint_norms = JointNormsVariant(dtype, spec.query_size, spec.kv_size)
        self._rope = RopeWriteKvVariant(
            dtype,
            spec.head_dim,
            block_size,
            kv_dtype,
            spec.has_qkv_bias,
            has_own_norms,
            has_float32_norms and has_own_norms,
            query_growth(spec) is not None,
        )
        # By whether a layer has a window, of those that there are.
        group = spec.num_heads // spec.num_kv_heads
        shape = (dtype, spec.head_dim, group, block_size, kv_dtype)
        self._windows = {spec.window_of(layer) for layer in range(spec.num_layers)}
        kinds = sorted({window is not None for window in self._windows})
        sinks = spec.has_sinks
        self._decode = {kind: DecodeVariant(*shape, kind, sinks) for kind in kinds}
        self._prefill = {kind: PrefillVariant(*shape, kind, sinks) for kind in kinds}
        # Asked for in each layer of a step that no graph holds; the same for both kinds.
        self._plan_decode = lru_cache(maxsize=64)(self._decode[kinds[0]].plan)
        self._num_kv_heads = spec.num_kv_heads
        self._scale_log2e = LOG2_E / math.sqrt(spec.head_dim)
        # Attention leaves them as zeros, and a graph's launches have them for good.
        self._tickets = torch.zeros(
            num_tickets(launcher.num_multiprocessors), dtype=torch.int32, device=launcher.device
        )

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        norms = [] if self._joint_norms is None else [self._joint_norms]
        return [*norms, self._rope, *self._decode.values(), *self._prefill.values()]

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a prefill tile."""
        return next(iter(self._prefill.values())).tile_tokens

    def rope_write_kv(
        self,
        out: Tensor,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        positions: Tensor,
        kv_slots: Tensor,
        changes: HeadChanges = UNCHANGED,
    ) -> None:
        """Rotate the queries, write keys and values; a variant does not touch what it has not."""
        num_tokens, num_heads, _ = out.shape
        num_kv_heads = pool.shape[3]
        norms = changes.norms
        if self._joint_norms is not None and norms is not None:
            grid = self._joint_norms.grid(num_tokens)
            self._launcher.launch(self._joint_norms, grid, qkv, *norms, changes.eps)
            norms = None
        self._launcher.launch(
            self._rope,
            self._rope.grid(num_tokens, num_heads, num_kv_heads),
            out,
            pool,
            qkv,
            *angles,
            positions,
            kv_slots,
            num_heads,
            num_kv_heads,
            *layer_strides(pool, layer),
            out if changes.bias is None else changes.bias,
            *(norms or (out, out)),
            changes.eps,
            *(changes.growth or (angles[0], 1)),
        )

    def attention_decode(
        self,
        out: Tensor,
        query: Tensor,
        pool: Tensor,
        layer: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        longest: int,
        own: LayerAttention = PLAIN,
    ) -> None:
        """Attend with one token a row; some or all are split where that fills the device."""
        plan = self._plan_decode(
            query.shape[0], pool.shape[3], longest, self._launcher.num_multiprocessors, own.window
        )
        partials = torch.empty(plan.num_partials, dtype=torch.float32, device=query.device)
        self._launcher.launch(
            self._decode[own.window is not None],
            plan.grid,
            out,
            query,
            pool,
            block_tables,
            seq_lens,
            partials,
            self._tickets,
            plan.split_rows,
            self._scale_log2e,
            query.stride(0),
            block_tables.shape[1],
            *layer_strides(pool, layer),
            NO_WINDOW if own.window is None else own.window,
            out if own.sinks is None else own.sinks,
        )

    def most_partials(self, num_rows: int, longest: int) -> int:
        """Return how many float32 `attention_decode` has for partial results, at most."""
        place = self._launcher.num_multiprocessors
        variant = next(iter(self._decode.values()))  # both kinds have the same plans
        return max(
            variant.most_partials(num_rows, self._num_kv_heads, longest, place, window)
            for window in self._windows
        )

    def attention_prefill(
        self,
        out: Tensor,
        query: Tensor,
        pool: Tensor,
        layer: int,
        rows: PrefillRows,
        own: LayerAttention = PLAIN,
    ) -> None:
        """Attend with the last tokens of each row, tile by tile."""
        variant = self._prefill[own.window is not None]
        self._launcher.launch(
            variant,
            variant.grid(pool.shape[3], len(rows.tile_rows)),
            out,
            query,
            pool,
            rows.block_tables,
            rows.seq_lens,
            rows.cu_query_lens,
            rows.tile_rows,
            rows.tile_tokens,
            self._scale_log2e,
            query.stride(0),
            rows.block_tables.shape[1],
            *layer_strides(pool, layer),
            NO_WINDOW if own.window is None else own.window,
            out if own.sinks is None else own.sinks,
        )


def layer_strides(pool: Tensor, layer: int) -> tuple[int, int, int]:
    """Return a kernel's way to a layer of the pool, in elements.

    From block to block, to the layer's keys, to its values (drawn in `attention_decode`).
    """
    block, of_layer, of_values, *_ = pool.stride()
    keys = layer * of_layer
    return block, keys, keys + of_values
