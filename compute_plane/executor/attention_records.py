"""The records of a layer's attention: angles, rotation with the write of K and V, attention, gate.

Layers that attend have keys and values in the pool, in their order; others have none there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.executor.step_table import StepTable
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
    ROPE_WRITE,
    gate_attended,
    joint_norms,
    merge_attention,
    rope_angles,
)
from kernels.cpu.operands import Attention, AttentionGate, JointNorms, RopeAngles, RopeWrite
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from compute_plane.executor.packed_layers import PackedAttention
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.model.spec import ModelSpec

FLOAT_BYTES: Final = 4


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
        self._first_layer = first_layer
        self._kv_layers = {
            layer: number for number, layer in enumerate(spec.attending_layers(first_layer))
        }
        self._qkv, self._attended = qkv, attended
        half = spec.head_dim // 2
        self._queries = self._floats(max_tokens * spec.query_size)
        self._angles = self._floats(max_tokens * half), self._floats(max_tokens * half)
        self._growth = self._growth_of(spec)
        self._no_angles = self._angles
        self._local_angles = self._angles
        if spec.layers_without_rope:
            cosines, sines = (
                arena.take(FLOAT_BYTES * max_tokens * half).view(np.float32) for _ in range(2)
            )
            cosines.fill(score_factor(spec))
            self._no_angles = cosines.ctypes.data, sines.ctypes.data
        self._partials = self._floats(
            MAX_SHARED_ITEMS * attention_partial_floats(spec.num_heads, spec.head_dim)
        )
        self.before = [self._rope_angles(spec, self._angles)]
        if spec.layers_with_local_rope:
            self._local_angles = self._floats(max_tokens * half), self._floats(max_tokens * half)
            self.before.append(self._rope_angles(local_rope(spec), self._local_angles))

    @property
    def scratch_bytes(self) -> int:
        """What a worker needs."""
        spec = self._spec
        group = spec.num_heads // spec.num_kv_heads
        return max(
            rope_scratch_bytes(spec.head_dim),
            attention_scratch_bytes(spec.head_dim, spec.head_dim, rows_per_item(group)),
        )

    def rope_write(self, index: int, layer: PackedAttention, epsilon: int) -> list[int]:
        """Rotate queries and keys, and write keys and values. `epsilon`: of norms of heads."""
        if layer.head_norms is None or not self._spec.norms_heads_together:
            return [self._rope_write(index, layer, layer.head_norms, epsilon)]
        norms = self._joint_norms(layer.head_norms, epsilon)
        return [norms, self._rope_write(index, layer, None, epsilon)]

    def _joint_norms(self, norms: tuple[int, int], epsilon: int) -> int:
        return self._table.add(
            joint_norms,
            StepWord.TOKEN_CHUNKS,
            {
                JointNorms.QKV: self._qkv,
                JointNorms.QUERY_SIZE: self._spec.query_size,
                JointNorms.KEY_SIZE: self._spec.kv_size,
                JointNorms.QUERY_NORM: norms[0],
                JointNorms.KEY_NORM: norms[1],
                JointNorms.EPSILON: epsilon,
            },
        )

    def _rope_write(
        self, index: int, layer: PackedAttention, head_norms: tuple[int, int] | None, epsilon: int
    ) -> int:
        spec, layout = self._spec, self._pool.layout
        query_norm, key_norm = head_norms or (0, 0)
        cosines, sines = self._angles_of(self._first_layer + index)
        return self._table.add(
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
                RopeWrite.EPSILON: epsilon,
                RopeWrite.GROWTH: self._growth[0],
                RopeWrite.GROWTH_LENGTH: self._growth[1],
            },
        )

    def attend(self, index: int, layer: PackedAttention) -> list[int]:
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
            Attention.VALUE_DIM: spec.head_dim,
            Attention.HEAD_STRIDE: layout.head_bytes,
            Attention.QUERIES_FIRST_WORD: StepWord.FIRST_TOKEN,
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

    def _rope_angles(self, spec: ModelSpec, angles: tuple[int, int]) -> int:
        frequencies, factors = inverse_frequencies(spec), attention_factors(spec)
        self._table.keep(frequencies)
        self._table.keep(factors)
        return self._table.add(
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

    def _layer_address(self, index: int) -> int:
        number = self._kv_layers[self._first_layer + index]
        return self._pool.address + number * self._pool.layout.layer_bytes

    def _angles_of(self, layer: int) -> tuple[int, int]:
        """Return the addresses of the cosines and sines by which a layer's heads turn."""
        if layer in self._spec.layers_without_rope:
            return self._no_angles
        is_local = layer in self._spec.layers_with_local_rope
        return self._local_angles if is_local else self._angles

    def _floats(self, count: int) -> int:
        """Return the address of float32 memory that lives as long as the table."""
        return self._arena.take(FLOAT_BYTES * count).ctypes.data
