"""The records of a layer's attention: angles, rotation with the write of K and V, attention, gate.

Layers that attend have keys and values in the pool, in their order, or attend to those of an
earlier one; others have none there. Where layers have heads of several kinds, each kind has a part
of the pool (`PoolLayout`) and angles of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.product_records import float_bits
from compute_plane.cpu.step_table import StepTable
from compute_plane.model.rope import (
    attention_factors,
    inverse_frequencies,
    local_rope,
    of_heads,
    query_growth,
    score_factor,
)
from kernels.cpu.attention_items import rows_per_item
from kernels.cpu.attention_plan import num_slots
from kernels.cpu.attention_sizes import (
    attention_partial_floats,
    attention_scratch_bytes,
    rope_scratch_bytes,
)
from kernels.cpu.catalogue import (
    ATTENTION,
    ROPE_WRITE,
    gate_attended,
    joint_norms,
    merge_attention,
    rope_angles,
)
from kernels.cpu.operands import Attention, AttentionGate, JointNorms, RopeAngles, RopeWrite
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedAttention
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.model.heads import Heads
    from compute_plane.model.spec import ModelSpec
    from kernels.cpu.kv_layout import KvLayout

FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """The layers whose heads are of one kind.

    `layout`: of their part of the pool, which begins at `address` in block 0; `numbers`: which of
    its layers theirs are, of those with keys. `angles`, `local_angles`, `no_angles`: addresses of
    the cosines and sines by which they turn, each where any does. `ones`: address of float32 [D].
    """

    heads: Heads
    layout: KvLayout
    address: int
    numbers: dict[int, int]
    angles: tuple[int, int]
    local_angles: tuple[int, int]
    no_angles: tuple[int, int]
    ones: int


class AttentionRecords:
    """Adds records to a table; each method returns their addresses.

    `first_layer`: of the model, the first one whose records are wanted. `max_tokens`: of a step.
    `qkv`, `attended`: addresses of float32 [T, (H + 2·G)·D] and [T, H·D] of a piece. `before`: what
    a piece needs once.
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        spec: ModelSpec,
        pool: KvPool,
        *,
        first_layer: int,
        max_tokens: int,
        qkv: int,
        attended: int,
    ) -> None:
        self._table, self._arena, self._spec, self._pool = table, arena, spec, pool
        self._first_layer, self._max_tokens = first_layer, max_tokens
        self._qkv, self._attended = qkv, attended
        kinds = spec.kinds_of_heads
        self._queries = self._floats(max_tokens * max(heads.query_size for heads in kinds))
        self._growth = self._growth_of(spec)
        partial = max(attention_partial_floats(heads.num_heads, heads.head_dim) for heads in kinds)
        longest = min(spec.context_length, pool.num_tokens)
        self.num_slots = num_slots(longest, pool.block_size, partial)
        self._partials = self._floats(self.num_slots * partial)
        self.before: list[int] = []
        self._kinds = {heads: self._kind(part, heads) for part, heads in enumerate(kinds)}

    def _kind(self, part: int, heads: Heads) -> _Kind:
        spec, layout = self._spec, self._pool.layout
        layers = [
            layer
            for layer in spec.attending_layers(self._first_layer)
            if spec.heads_of(layer) == heads
        ]
        own = of_heads(spec, heads)
        none = 0, 0
        angles = local_angles = no_angles = none
        is_local, is_still = spec.layers_with_local_rope, spec.layers_without_rope
        if not is_local.union(is_still).issuperset(layers):
            angles = self._rope_angles(own)
        if not is_local.isdisjoint(layers):
            local_angles = self._rope_angles(local_rope(own))
        if not is_still.isdisjoint(layers):
            no_angles = self._no_angles(own)
        ones = 0
        if spec.norms_values:
            weights = np.ones(heads.head_dim, np.float32)
            self._table.keep(weights)
            ones = weights.ctypes.data
        return _Kind(
            heads,
            layout.parts[part],
            self._pool.address + layout.bytes_before(part),
            {
                layer: number
                for number, layer in enumerate(
                    layer for layer in layers if spec.kv_source_of(layer) == layer
                )
            },
            angles,
            local_angles,
            no_angles,
            ones,
        )

    def rows_between(self, index: int) -> list[tuple[int, int]]:
        """Return address and width of the queries of a layer, if it attends."""
        layer = self._first_layer + index
        if layer not in self._spec.attending_layers(self._first_layer):
            return []
        return [(self._queries, self._kind_of(index).heads.query_size)]

    @property
    def scratch_bytes(self) -> int:
        """What a worker needs."""
        kinds = self._spec.kinds_of_heads
        rows = rows_per_item(max(heads.group for heads in kinds))
        return max(
            max(
                rope_scratch_bytes(heads.head_dim),
                attention_scratch_bytes(heads.head_dim, heads.head_dim, rows),
            )
            for heads in kinds
        )

    def rope_write(self, index: int, layer: PackedAttention, epsilon: int) -> list[int]:
        """Rotate queries and keys, and write keys and values. `epsilon`: of norms of heads."""
        if layer.head_norms is None or not self._spec.norms_heads_together:
            return [self._rope_write(index, layer, layer.head_norms, epsilon)]
        norms = self._joint_norms(layer.head_norms, epsilon)
        return [norms, self._rope_write(index, layer, None, epsilon)]

    def _joint_norms(self, norms: tuple[int, int | None], epsilon: int) -> int:
        return self._table.add(
            joint_norms,
            StepWord.TOKEN_CHUNKS,
            {
                JointNorms.QKV: self._qkv,
                JointNorms.QUERY_SIZE: self._spec.query_size,
                JointNorms.KEY_SIZE: self._spec.kv_size,
                JointNorms.QUERY_NORM: norms[0],
                JointNorms.KEY_NORM: norms[1] or 0,
                JointNorms.EPSILON: epsilon,
            },
        )

    def _rope_write(
        self,
        index: int,
        layer: PackedAttention,
        head_norms: tuple[int, int | None] | None,
        epsilon: int,
    ) -> int:
        number, kind = self._first_layer + index, self._kind_of(index)
        heads, writes = kind.heads, self._spec.kv_source_of(number) == number
        query_norm, key_norm = head_norms or (0, 0)
        cosines, sines = self._angles_of(number, kind)
        return self._table.add(
            ROPE_WRITE[kind.layout.dtype],
            StepWord.TOKEN_CHUNKS,
            {
                RopeWrite.QKV: self._qkv,
                RopeWrite.COSINES: cosines,
                RopeWrite.SINES: sines,
                RopeWrite.QUERIES: self._queries,
                RopeWrite.POOL: self._layer_address(index),
                RopeWrite.BLOCK_BYTES: self._pool.layout.block_bytes,
                RopeWrite.HEAD_BYTES: kind.layout.head_bytes,
                RopeWrite.BLOCK_SIZE: kind.layout.block_size,
                RopeWrite.HEAD_DIM: heads.head_dim,
                RopeWrite.NUM_HEADS: heads.num_heads,
                RopeWrite.NUM_KV_HEADS: heads.num_kv_heads if writes else 0,
                RopeWrite.BIAS: layer.qkv_bias or 0,
                RopeWrite.QUERY_NORM: query_norm,
                RopeWrite.KEY_NORM: key_norm or 0,
                RopeWrite.VALUE_NORM: kind.ones,
                RopeWrite.EPSILON: epsilon,
                RopeWrite.GROWTH: self._growth[0],
                RopeWrite.GROWTH_LENGTH: self._growth[1],
            },
        )

    def attend(self, index: int, layer: PackedAttention) -> list[int]:
        """Attend; then merge what threads found in parts of one context, if they shared any."""
        spec, kind = self._spec, self._kind_of(index)
        heads, layout = kind.heads, kind.layout
        operands: dict[int, int] = {
            Attention.QUERIES: self._queries,
            Attention.OUT: self._attended,
            Attention.POOL: self._layer_address(index),
            Attention.BLOCK_BYTES: self._pool.layout.block_bytes,
            Attention.HEAD_BYTES: layout.head_bytes,
            Attention.BLOCK_SIZE: layout.block_size,
            Attention.HEAD_DIM: heads.head_dim,
            Attention.NUM_HEADS: heads.num_heads,
            Attention.NUM_KV_HEADS: heads.num_kv_heads,
            Attention.PARTIALS: self._partials,
            Attention.WINDOW: spec.window_of(self._first_layer + index) or 0,
            Attention.SINKS: layer.sinks or 0,
            Attention.VALUE_DIM: heads.head_dim,
            Attention.HEAD_STRIDE: layout.head_bytes,
            Attention.QUERIES_FIRST_WORD: StepWord.FIRST_TOKEN,
            # In powers of 2, as scores are.
            Attention.CAP: float_bits((spec.scores_cap or 0) * math.log2(math.e)),
        }
        return [
            self._table.add(ATTENTION[layout.dtype], StepWord.ATTENTION_CHUNKS, operands),
            self._table.add(merge_attention, StepWord.MERGE_CHUNKS, operands),
        ]

    def gate(self, gates: int) -> int:
        """Multiply what was attended by the sigmoid of float32 [T, H·D] at `gates`."""
        return self._table.add(
            gate_attended,
            StepWord.TOKEN_CHUNKS,
            {
                AttentionGate.OUT: self._attended,
                AttentionGate.GATES: gates,
                AttentionGate.N: self._spec.query_size,
                AttentionGate.GATES_STRIDE: self._spec.query_size,
            },
        )

    def _growth_of(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the address of the factors by which queries grow, and for how many positions."""
        growth = query_growth(spec)
        if growth is None:
            return 0, 0
        self._table.keep(growth[0])
        return growth[0].ctypes.data, growth[1]

    def _rope_angles(self, spec: ModelSpec) -> tuple[int, int]:
        """Have the cosines and sines of a piece made, and return their addresses."""
        half = spec.head_dim // 2
        angles = self._floats(self._max_tokens * half), self._floats(self._max_tokens * half)
        frequencies, factors = inverse_frequencies(spec), attention_factors(spec)
        self._table.keep(frequencies)
        self._table.keep(factors)
        record = self._table.add(
            rope_angles,
            StepWord.TOKEN_CHUNKS,
            {
                RopeAngles.FREQUENCIES: frequencies.ctypes.data,
                RopeAngles.COSINES: angles[0],
                RopeAngles.SINES: angles[1],
                RopeAngles.HALF: half,
                RopeAngles.FACTORS: factors.ctypes.data,
            },
        )
        self.before.append(record)
        return angles

    def _no_angles(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the addresses of cosines and sines by which heads do not turn."""
        num_bytes = FLOAT_BYTES * self._max_tokens * (spec.head_dim // 2)
        cosines, sines = (self._arena.take(num_bytes).view(np.float32) for _ in range(2))
        cosines.fill(score_factor(spec))
        return cosines.ctypes.data, sines.ctypes.data

    def _kind_of(self, index: int) -> _Kind:
        return self._kinds[self._spec.heads_of(self._first_layer + index)]

    def _layer_address(self, index: int) -> int:
        """Return the address in block 0 of the keys and values that a layer attends to."""
        kind = self._kind_of(index)
        number = kind.numbers[self._spec.kv_source_of(self._first_layer + index)]
        return kind.address + number * kind.layout.layer_bytes

    def _angles_of(self, layer: int, kind: _Kind) -> tuple[int, int]:
        """Return the addresses of the cosines and sines by which a layer's heads turn."""
        if layer in self._spec.layers_without_rope:
            return kind.no_angles
        is_local = layer in self._spec.layers_with_local_rope
        return kind.local_angles if is_local else kind.angles

    def _floats(self, count: int) -> int:
        """Return the address of float32 memory that lives as long as the table."""
        return self._arena.take(FLOAT_BYTES * count).ctypes.data
