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
    num_kv_heads_of,
)
from compute_plane.model.heads import Heads
from compute_plane.model.rope import query_growth
from kernels.cuda.attention_chunks import num_tickets
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import LOG2_E, NO_CAP, NO_WINDOW
from kernels.cuda.attention_wide import WIDE_HEAD_SIZE, WideDecodeVariant, WidePrefillVariant
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
        self._kinds = {
            heads: _OfHeads(spec, heads, dtype, block_size, kv_dtype)
            for heads in spec.kinds_of_heads
        }
        self._numbers = {heads: number for number, heads in enumerate(self._kinds)}
        # Attention leaves them as zeros, and a graph's launches have them for good.
        self._tickets = torch.zeros(
            num_tickets(launcher.num_multiprocessors), dtype=torch.int32, device=launcher.device
        )

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        return [variant for of in self._kinds.values() for variant in of.variants]

    @property
    def tile_tokens(self) -> tuple[int, ...]:
        """Query tokens of a prefill tile, by kind of heads."""
        return tuple(of.tile_tokens for of in self._kinds.values())

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
        num_tokens, num_heads, head_dim = out.shape
        num_kv_heads = num_kv_heads_of(qkv, num_heads, head_dim)
        of = self._kinds[_heads_of(out, pool)]
        query_norm, key_norm = changes.norms or (None, None)
        if of.joint_norms is not None:
            grid = of.joint_norms.grid(num_tokens)
            self._launcher.launch(of.joint_norms, grid, qkv, query_norm, key_norm, changes.eps)
            query_norm = key_norm = None
        self._launcher.launch(
            of.rope,
            of.rope.grid(num_tokens, num_heads, num_kv_heads),
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
            out if query_norm is None else query_norm,
            out if key_norm is None else key_norm,
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
        of = self._kinds[_heads_of(query, pool)]
        plan = of.plan_decode(
            query.shape[0], pool.shape[3], longest, self._launcher.num_multiprocessors, own.window
        )
        partials = torch.empty(plan.num_partials, dtype=torch.float32, device=query.device)
        self._launcher.launch(
            of.decode[own.window is not None],
            plan.grid,
            out,
            query,
            pool,
            block_tables,
            seq_lens,
            partials,
            self._tickets,
            plan.split_rows,
            of.scale_log2e,
            query.stride(0),
            block_tables.shape[1],
            *layer_strides(pool, layer),
            NO_WINDOW if own.window is None else own.window,
            out if own.sinks is None else own.sinks,
            NO_CAP if own.cap is None else own.cap * LOG2_E,
        )

    def most_partials(self, num_rows: int, longest: int) -> int:
        """Return how many float32 `attention_decode` has for partial results, at most."""
        place = self._launcher.num_multiprocessors
        return max(
            of.decode[window is not None].most_partials(
                num_rows, heads.num_kv_heads, longest, place, window
            )
            for heads, of in self._kinds.items()
            for window in of.windows
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
        heads = _heads_of(query, pool)
        of, tiles = self._kinds[heads], rows.tiles[self._numbers[heads]]
        variant = of.prefill[own.window is not None]
        self._launcher.launch(
            variant,
            variant.grid(heads.num_kv_heads, len(tiles.rows)),
            out,
            query,
            pool,
            rows.block_tables,
            rows.seq_lens,
            rows.cu_query_lens,
            *tiles,
            of.scale_log2e,
            query.stride(0),
            rows.block_tables.shape[1],
            *layer_strides(pool, layer),
            NO_WINDOW if own.window is None else own.window,
            out if own.sinks is None else own.sinks,
            NO_CAP if own.cap is None else own.cap * LOG2_E,
        )


class _OfHeads:
    """The kernels of layers whose heads are of one kind."""

    def __init__(
        self, spec: ModelSpec, heads: Heads, dtype: str, block_size: int, kv_dtype: str | None
    ) -> None:
        has_float32_norms = spec.norms_need_float32 and dtype != "float32"
        has_own_norms = spec.has_head_norms and not spec.norms_heads_together
        self.joint_norms: JointNormsVariant | None = None
        if spec.norms_heads_together:
            self.joint_norms = JointNormsVariant(dtype, heads.query_size, heads.kv_size)
        self.rope = RopeWriteKvVariant(
            dtype,
            heads.head_dim,
            block_size,
            kv_dtype,
            spec.has_qkv_bias,
            has_own_norms,
            has_float32_norms and has_own_norms,
            query_growth(spec) is not None,
            spec.norms_values,
        )
        # By whether a layer has a window, of those that there are.
        self.windows = {
            spec.window_of(layer)
            for layer in spec.attending_layers()
            if spec.heads_of(layer) == heads
        }
        kinds = sorted({window is not None for window in self.windows})
        shape = dtype, heads.head_dim, heads.group, block_size, kv_dtype
        is_wide = heads.head_dim == WIDE_HEAD_SIZE
        of_decode = WideDecodeVariant if is_wide else DecodeVariant
        of_prefill = WidePrefillVariant if is_wide else PrefillVariant
        own = spec.has_sinks, spec.scores_cap is not None
        self.decode = {kind: of_decode(*shape, kind, *own) for kind in kinds}
        self.prefill = {kind: of_prefill(*shape, kind, *own) for kind in kinds}
        # Asked for in each layer of a step that no graph holds; the same with a window and without.
        self.plan_decode = lru_cache(maxsize=64)(self.decode[kinds[0]].plan)
        self.scale_log2e = LOG2_E / math.sqrt(heads.head_dim)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        norms = [] if self.joint_norms is None else [self.joint_norms]
        return [*norms, self.rope, *self.decode.values(), *self.prefill.values()]

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a prefill tile."""
        return next(iter(self.prefill.values())).tile_tokens


def _heads_of(query: Tensor, pool: Tensor) -> Heads:
    """Return the heads of a layer by what it is given. `query`: [T, H, D]."""
    _, num_heads, head_dim = query.shape
    return Heads(num_heads, pool.shape[3], head_dim)


def layer_strides(pool: Tensor, layer: int) -> tuple[int, int, int]:
    """Return a kernel's way to a layer of the pool, in elements.

    From block to block, to the layer's keys, to its values (drawn in `attention_decode`).
    """
    block, of_layer, of_values, *_ = pool.stride()
    keys = layer * of_layer
    return block, keys, keys + of_values
