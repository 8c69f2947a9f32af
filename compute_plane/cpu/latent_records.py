"""The records of a layer's attention over latents.

Letters: `compute_plane.model.latents`, `kernels.reference.latent_attention`; H heads.

    write:  norm → latents → normalise, rotate, write as keys and values
    read:   norm → (first queries → norm →) queries → each head's N elements · its keys
            → rotate, scale → attention → each head's R elements · its values → O

Queries are made where they are read, so their rows are those of a piece. Attention sees `parts` kv
heads that all read the same, so that threads can share the heads of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.cpu.attention_records import AttentionRecords
from compute_plane.cpu.product_records import (
    MOST_PRODUCT_CHUNKS,
    ProductRecords,
)
from compute_plane.cpu.row_buffers import RowBuffers
from compute_plane.model.rope import attention_factors, inverse_frequencies
from kernels.cpu.attention_items import rows_per_item
from kernels.cpu.attention_plan import num_slots
from kernels.cpu.attention_sizes import (
    ROW_BLOCK,
    attention_partial_floats,
    attention_scratch_bytes,
    rope_scratch_bytes,
)
from kernels.cpu.catalogue import (
    ATTENTION,
    LATENT_WRITE,
    latent_queries,
    merge_attention,
    normed_rows,
    plain_rows,
    products_of_heads,
    rope_angles,
    rows_of_heads,
)
from kernels.cpu.latent_operands import (
    HeadCalls,
    LatentQueries,
    LatentWrite,
)
from kernels.cpu.operands import (
    Attention,
    RopeAngles,
    RowFormat,
    RowInput,
    group_bytes,
    row_bytes,
)
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compute_plane.cpu.packed_latents import PackedHeads, PackedLatents
    from compute_plane.cpu.packed_layers import PackedMatrix
    from compute_plane.cpu.step_table import StepTable
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.model.latents import Latents
    from compute_plane.model.spec import ModelSpec

FLOAT_BYTES: Final = 4
LOG2_E: Final = 1.4426950408889634
LEAST_PARTS: Final = 2
"""Into which the heads of a token are cut, where they can be."""


def work_heads(spec: ModelSpec) -> int:
    """Return the kv heads among which threads share attention.

    Where layers differ, the fewest. Of latents they are parts of the query heads that all read the
    same: as few as have no more heads than rows go through a super-block together, two at least.
    """
    if spec.latents is None:
        return min(heads.num_kv_heads for heads in spec.kinds_of_heads)
    heads = spec.num_heads
    parts = (n for n in range(min(LEAST_PARTS, heads), heads) if heads % n == 0)
    return next((n for n in parts if heads // n <= ROW_BLOCK), heads)


def chunk_heads(spec: ModelSpec) -> int:
    """Return the same where layers differ, the most: into so many parts an item can be cut."""
    if spec.latents is None:
        return max(heads.num_kv_heads for heads in spec.kinds_of_heads)
    return work_heads(spec)


def largest_group(spec: ModelSpec) -> int:
    """Return how many query heads read one of them at most."""
    if spec.latents is None:
        return max(heads.group for heads in spec.kinds_of_heads)
    return spec.num_heads // work_heads(spec)


class LatentRecords:
    """Adds records to a table; methods return their addresses.

    `max_tokens`: of a step, `max_rows`: of a piece. `before`: what a piece needs once.
    `scratch_bytes`: what a worker needs for all but products.
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        spec: ModelSpec,
        of: Latents,
        pool: KvPool,
        *,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._table, self._spec, self._of, self._pool = table, spec, of, pool
        self._max_rows = max_rows
        heads = spec.num_heads

        def floats(count: int) -> int:
            return arena.take(FLOAT_BYTES * count).ctypes.data

        half = of.turning // 2
        self._angles = floats(max_tokens * half), floats(max_tokens * half)
        self._inputs = floats(max_rows * of.row_size)
        self._first = floats(max_rows * of.query_rank)
        self._made = floats(max_rows * heads * of.head_size)
        self._queries = floats(max_rows * heads * of.row_size)
        self._attended = floats(max_rows * heads * of.rank)
        self._given = floats(max_rows * spec.attended_size)
        partial = attention_partial_floats(heads, of.rank)
        longest = min(spec.context_length, pool.num_tokens)
        self.num_slots = num_slots(longest, pool.block_size, partial)
        self._partials = floats(self.num_slots * partial)
        # One behind the other: rows of a head begin max_rows rows behind those of the one before.
        self.rows = RowBuffers(arena, max_rows * heads, max(of.plain, of.rank))
        self.before = [self._rope_angles(half)]
        rows = rows_per_item(heads // work_heads(spec))
        self.scratch_bytes = max(
            rope_scratch_bytes(of.row_size), attention_scratch_bytes(of.row_size, of.rank, rows)
        )

    def _rope_angles(self, half: int) -> int:
        frequencies = inverse_frequencies(self._spec)[:half].copy()
        factors = attention_factors(self._spec)[:half].copy()
        self._table.keep(frequencies)
        self._table.keep(factors)
        return self._table.add(
            rope_angles,
            StepWord.TOKEN_CHUNKS,
            {
                RopeAngles.FREQUENCIES: frequencies.ctypes.data,
                RopeAngles.COSINES: self._angles[0],
                RopeAngles.SINES: self._angles[1],
                RopeAngles.HALF: half,
                RopeAngles.FACTORS: factors.ctypes.data,
            },
        )

    def write(
        self,
        index: int,
        layer: PackedLatents,
        products: ProductRecords,
        read: Callable[[Sequence[PackedMatrix]], list[int]],
        epsilon: int,
    ) -> list[int]:
        """Make what tokens leave and write it. `read`: makes rows that matrices read of hidden."""
        of, layout = self._of, self._pool.layout.parts[0]
        return [
            *read([layer.latents]),
            *products.product(layer.latents, self._inputs, of.row_size),
            self._table.add(
                LATENT_WRITE[layout.dtype],
                StepWord.TOKEN_CHUNKS,
                {
                    LatentWrite.INPUTS: self._inputs,
                    LatentWrite.RANK: of.rank,
                    LatentWrite.TURNING: of.turning,
                    LatentWrite.WEIGHT: layer.latent_norm,
                    LatentWrite.EPSILON: epsilon,
                    LatentWrite.COSINES: self._angles[0],
                    LatentWrite.SINES: self._angles[1],
                    LatentWrite.POOL: self._layer_address(index),
                    LatentWrite.BLOCK_BYTES: layout.block_bytes,
                    LatentWrite.HEAD_BYTES: layout.head_bytes,
                    LatentWrite.BLOCK_SIZE: layout.block_size,
                },
            ),
        ]

    def attend(
        self,
        index: int,
        layer: PackedLatents,
        products: ProductRecords,
        of_heads: ProductRecords,
        read: Callable[[Sequence[PackedMatrix]], list[int]],
        epsilon: int,
    ) -> list[int]:
        """Make queries, attend, and make the rows that the product behind reads.

        `of_heads`: products on `rows`.
        """
        of, heads = self._of, self._spec.num_heads
        given: dict[int, int] = {
            RowInput.SOURCE: self._given,
            RowInput.SOURCE_STRIDE: self._spec.attended_size,
        }
        return [
            *self._queries_of(layer, products, read, epsilon),
            *self._by_heads(
                of_heads, layer.keys, (self._made, of.head_size), (self._queries, of.row_size)
            ),
            self._table.add(
                latent_queries,
                StepWord.TOKEN_CHUNKS,
                {
                    LatentQueries.SOURCE: self._made,
                    LatentQueries.QUERIES: self._queries,
                    LatentQueries.NUM_HEADS: heads,
                    LatentQueries.PLAIN: of.plain,
                    LatentQueries.RANK: of.rank,
                    LatentQueries.TURNING: of.turning,
                    LatentQueries.SCALE: int(np.float32(LOG2_E * of.score_scale).view(np.uint32)),
                    LatentQueries.COSINES: self._angles[0],
                    LatentQueries.SINES: self._angles[1],
                },
            ),
            *self._attention(index),
            *self._by_heads(
                of_heads, layer.values, (self._attended, of.rank), (self._given, of.value_size)
            ),
            *products.rows(plain_rows, [layer.o], given),
        ]

    def _queries_of(
        self,
        layer: PackedLatents,
        products: ProductRecords,
        read: Callable[[Sequence[PackedMatrix]], list[int]],
        epsilon: int,
    ) -> list[int]:
        width = self._spec.num_heads * self._of.head_size
        first, norm = layer.first_queries, layer.query_norm
        if first is None or norm is None:
            made = read([layer.queries])
        else:
            operands: dict[int, int] = {
                RowInput.SOURCE: self._first,
                RowInput.SOURCE_STRIDE: first.n,
                RowInput.WEIGHT: norm,
                RowInput.EPSILON: epsilon,
            }
            made = [
                *read([first]),
                *products.product(first, self._first, first.n),
                *products.rows(normed_rows, [layer.queries], operands),
            ]
        return [*made, *products.product(layer.queries, self._made, width)]

    def _by_heads(
        self,
        products: ProductRecords,
        matrices: PackedHeads,
        source: tuple[int, int],
        out: tuple[int, int],
    ) -> list[int]:
        """Multiply the first elements of each head with its matrix.

        `source`, `out`: addresses of float32 [T, H·n] and n.
        """
        first, heads = matrices.first, matrices.num_heads
        operands: dict[int, int] = {
            RowInput.SOURCE: source[0],
            RowInput.SOURCE_STRIDE: heads * source[1],
        }
        [made] = products.rows(plain_rows, [first], operands)
        [product] = products.product(first, out[0], heads * out[1])
        row_format: RowFormat = products.format_of(first)
        rows: dict[int, int] = {
            HeadCalls.NUM_HEADS: heads,
            HeadCalls.ROWS_BYTES: row_bytes(row_format, self._max_rows, first.k),
            HeadCalls.BESIDE_BYTES: group_bytes(self._max_rows, first.k),
        }
        return [
            self._table.add(
                rows_of_heads,
                StepWord.TOKEN_CHUNKS,
                {
                    **rows,
                    HeadCalls.RECORD: made,
                    HeadCalls.SOURCE_BYTES: FLOAT_BYTES * source[1],
                },
            ),
            self._table.add(
                products_of_heads,
                MOST_PRODUCT_CHUNKS,
                {
                    **rows,
                    HeadCalls.RECORD: product,
                    HeadCalls.SOURCE_BYTES: matrices.stride_bytes,
                    HeadCalls.OUT_BYTES: FLOAT_BYTES * out[1],
                },
                reads=(first.address, matrices.num_bytes),
            ),
        ]

    def _attention(self, index: int) -> list[int]:
        spec, of, layout = self._spec, self._of, self._pool.layout.parts[0]
        operands: dict[int, int] = {
            Attention.QUERIES: self._queries,
            Attention.OUT: self._attended,
            Attention.POOL: self._layer_address(index),
            Attention.BLOCK_BYTES: layout.block_bytes,
            Attention.HEAD_BYTES: layout.head_bytes,
            Attention.BLOCK_SIZE: layout.block_size,
            Attention.HEAD_DIM: of.row_size,
            Attention.NUM_HEADS: spec.num_heads,
            Attention.NUM_KV_HEADS: work_heads(spec),
            Attention.PARTIALS: self._partials,
            Attention.VALUE_DIM: of.rank,
            Attention.HEAD_STRIDE: 0,
            Attention.QUERIES_FIRST_WORD: StepWord.ZERO,
        }
        return [
            self._table.add(ATTENTION[layout.dtype], StepWord.ATTENTION_CHUNKS, operands),
            self._table.add(merge_attention, StepWord.MERGE_CHUNKS, operands),
        ]

    def _layer_address(self, index: int) -> int:
        return self._pool.address + index * self._pool.layout.parts[0].layer_bytes


def make_attention(
    table: StepTable,
    arena: HugePageArena,
    spec: ModelSpec,
    pool: KvPool,
    *,
    first_layer: int,
    max_tokens: int,
    max_rows: int,
    heads: tuple[int, int],
) -> AttentionRecords | LatentRecords:
    """Return what adds a model's attention to a table.

    `heads`: addresses of `qkv` and `attended` of `AttentionRecords`.
    """
    shape = table, arena, spec
    if spec.latents is not None:
        return LatentRecords(
            *shape, spec.latents, pool,
            max_tokens=max_tokens, max_rows=max_rows,
        )  # fmt: skip
    return AttentionRecords(
        *shape, pool,
        first_layer=first_layer, max_tokens=max_tokens, qkv=heads[0], attended=heads[1],
    )  # fmt: skip
