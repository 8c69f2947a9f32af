"""A drawn decode attention problem, as hostile as a real pool can be, and its float64 answer.

Rows of the batch have different lengths, one of them none (padding); their blocks lie scattered in
the pool, and the first two rows share their first block if both fill it. Whatever the kernel must
not read is poison: NaN in slots past a row's end, in blocks nobody owns and in the other layer;
block ids far outside the pool behind the end of each table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cuda.attention_decode import LOG2_E, DecodeVariant
from kernels.reference.paged_attention import paged_attention

Array = npt.NDArray[Any]

NO_BLOCK = 2**30  # an id no pool has
LAYERS, LAYER = 2, 1  # of the pool, and the one attended to


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Inputs as a device sees them (16-bit floats as their bits) and the exact output.

    `query`: [S, H + 1, D], of which the kernel is given the first H heads of each row, so that rows
    do not follow each other densely. `pool`: [N, L, 2, G, B, D]. `block_tables`: [S, M].
    `seq_lens`: [S]. `expected`: [S, H, D] float64.
    """

    variant: DecodeVariant
    query: Array
    pool: Array
    block_tables: Array
    seq_lens: Array
    scale: float
    expected: Array

    @property
    def num_kv_heads(self) -> int:
        """Kv heads of the pool."""
        return int(self.pool.shape[3])

    @property
    def scalars(self) -> tuple[float, int, int, int, int, int]:
        """The kernel's arguments behind the five arrays."""
        return decode_scalars(
            self.scale, self.query[0].size, self.block_tables.shape[1], self.pool.shape, LAYER
        )

    def error(self, out: Array) -> float:
        """Return the largest absolute difference of stored output [S, H, D] from the exact one.

        NaN counts as infinitely wrong.
        """
        difference = np.abs(to_float64(self.variant.dtype, out) - self.expected)
        return float(np.where(np.isnan(difference), np.inf, difference).max())


def decode_scalars(
    scale: float,
    query_stride: int,
    table_width: int,
    pool_shape: Sequence[int],
    layer: int,
) -> tuple[float, int, int, int, int, int]:
    """Return the kernel's scalar arguments for one layer of a pool [N, L, 2, G, B, D]."""
    block_stride = math.prod(pool_shape[1:])
    half_layer = math.prod(pool_shape[3:])
    key_offset = 2 * layer * half_layer
    return (
        scale * LOG2_E, query_stride, table_width, block_stride, key_offset,
        key_offset + half_layer,
    )  # fmt: skip


def draw_case(
    variant: DecodeVariant, seq_lens: Sequence[int], *, num_kv_heads: int = 2, seed: int = 0
) -> DecodeCase:
    """Draw a case with normally distributed queries, keys and values."""
    rng = np.random.default_rng(seed)
    num_rows, size = len(seq_lens), variant.block_size
    blocks_of_row = [-(-length // size) for length in seq_lens]
    num_blocks = sum(blocks_of_row) + 2
    tables = np.full((num_rows, max(blocks_of_row) + 1), NO_BLOCK, np.int32)
    free = iter(rng.permutation(num_blocks))
    for row, count in enumerate(blocks_of_row):
        tables[row, :count] = [next(free) for _ in range(count)]
    if num_rows > 1 and min(seq_lens[:2]) >= size:
        tables[1, 0] = tables[0, 0]

    shape = (num_blocks, LAYERS, 2, num_kv_heads, size, variant.head_size)
    values = np.full(shape, np.nan, np.float32)
    for row, length in enumerate(seq_lens):
        for index in range(blocks_of_row[row]):
            slots = min(size, length - index * size)
            block = values[tables[row, index], LAYER]
            block[:, :, :slots] = rng.standard_normal(block[:, :, :slots].shape)

    num_heads = num_kv_heads * variant.group
    query = rng.standard_normal((num_rows, num_heads + 1, variant.head_size))
    stored_query, stored_pool = (to_stored(variant.dtype, x) for x in (query, values))
    case = DecodeCase(
        variant, stored_query, stored_pool, tables, np.array(seq_lens, np.int32),
        variant.head_size**-0.5, np.zeros((num_rows, num_heads, variant.head_size)),
    )  # fmt: skip
    _attend_exactly(case)
    return case


def to_stored(dtype: str, values: Array) -> Array:
    """Round values to the elements a tensor of `dtype` holds, 16-bit floats as their bits."""
    single = np.asarray(values, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(single), 0x7FFF, rounded).astype(np.uint16)


def to_float64(dtype: str, stored: Array) -> Array:
    """Widen stored elements, exactly."""
    if dtype == "float16":
        stored = stored.view(np.float16)
    elif dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float64)


def _attend_exactly(case: DecodeCase) -> None:
    """Fill `case.expected` from the specification, computed in float64."""
    dtype = case.variant.dtype
    rows = np.flatnonzero(case.seq_lens).astype(np.int32)
    query = to_float64(dtype, case.query)[rows, : case.expected.shape[1]]
    out = np.empty_like(query)
    paged_attention(
        query, to_float64(dtype, case.pool), LAYER, case.block_tables, rows,
        case.seq_lens[rows] - 1, case.scale, 0, len(rows) * case.num_kv_heads, out,
    )  # fmt: skip
    case.expected[rows] = out
