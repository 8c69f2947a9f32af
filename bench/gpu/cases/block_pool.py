"""A block pool [N, L, 2, G, B, D] as hostile as a real one, and the rows of blocks in it.

Rows have different lengths, maybe none (padding); their blocks lie scattered, and the first two
rows share their first block if both fill it. Slots past a row's end, blocks nobody owns and the
other layer hold NaN (in a pool of eight bits their scales do); block ids far outside the pool stand
behind the end of each table. With windows, so it is before the first token that anybody sees.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.case import Array, poison, to_float64, to_stored
from kernels.cuda.quantized_kv import decode_heads, encode_heads

NO_BLOCK = 2**30  # an id no pool has
LAYERS, LAYER = 2, 1  # of the pool, and the one the kernels work on

# From this token on a row's keys can be so much longer that its largest score rises by far: only
# then the peak of 16-bit kernels follows. In float32 such scores would cost the digits that are
# tested.
RISE_AT = 64
RISE = {"float32": 1.0, "float16": 8.0, "bfloat16": 8.0}

CAP = 15.0
"""Of scores: small beside it, and from RISE_AT on as large; peaks must still follow them."""


@dataclass(frozen=True, slots=True)
class BlockPool:
    """`pool` as stored, in `dtype` or in `kv_dtype`; `tables` [S, M]; `seq_lens` [S] tokens."""

    dtype: str
    pool: Array
    tables: Array
    seq_lens: Array
    head_size: int
    kv_dtype: str | None = None

    @property
    def exact(self) -> Array:
        """The pool's values [N, L, 2, G, B, D] in float64."""
        return to_values(self.dtype, self.kv_dtype, self.head_size, self.pool)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from block to block, to the layer's keys, to its values."""
        return layer_strides(self.pool.shape, LAYER)


def layer_strides(pool_shape: Sequence[int], layer: int) -> tuple[int, int, int]:
    """Return elements from block to block, to a layer's keys, and to its values."""
    half_layer = math.prod(pool_shape[3:])
    key_offset = 2 * layer * half_layer
    return math.prod(pool_shape[1:]), key_offset, key_offset + half_layer


def to_pool(dtype: str, kv_dtype: str | None, values: Array) -> Array:
    """Return values [..., B, D] as a pool holds them."""
    if kv_dtype is None:
        return to_stored(dtype, values)
    return encode_heads(kv_dtype, np.asarray(values, np.float32))


def to_values(dtype: str, kv_dtype: str | None, head_size: int, pool: Array) -> Array:
    """Return what a pool stands for, [..., B, D] in float64."""
    if kv_dtype is None:
        return to_float64(dtype, pool)
    return decode_heads(kv_dtype, pool, head_size).astype(np.float64)


def draw_pool(
    rng: np.random.Generator,
    dtype: str,
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int,
    block_size: int,
    head_size: int,
    kv_dtype: str | None = None,
) -> BlockPool:
    """Draw normally distributed keys and values."""
    num_rows = len(seq_lens)
    blocks_of_row = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(blocks_of_row) + 2
    tables = np.full((num_rows, max(blocks_of_row) + 1), NO_BLOCK, np.int32)
    free = iter(rng.permutation(num_blocks))
    for row, count in enumerate(blocks_of_row):
        tables[row, :count] = [next(free) for _ in range(count)]
    if num_rows > 1 and min(seq_lens[:2]) >= block_size:
        tables[1, 0] = tables[0, 0]

    shape = (num_blocks, LAYERS, 2, num_kv_heads, block_size, head_size)
    values = np.full(shape, np.nan, np.float32)
    for row, length in enumerate(seq_lens):
        for index in range(blocks_of_row[row]):
            slots = min(block_size, length - index * block_size)
            block = values[tables[row, index], LAYER]
            block[:, :, :slots] = rng.standard_normal(block[:, :, :slots].shape)
    pool = to_pool(dtype, kv_dtype, values)
    if kv_dtype is not None:  # what nobody wrote: any bytes
        unknown = rng.integers(0, 256, (*pool.shape[:-1], block_size, head_size), np.uint8)
        codes = pool[..., : block_size * head_size].reshape(unknown.shape)
        codes[...] = np.where(np.isnan(values), unknown, codes)
    lengths = np.array(seq_lens, np.int32)
    return BlockPool(dtype, pool, tables, lengths, head_size, kv_dtype)


def before_hidden(pool: BlockPool, firsts: Sequence[int]) -> BlockPool:
    """Return the pool as hostile before the first tokens that rows see as behind their ends.

    `firsts`: of each row, the first token that is seen; its length, if none is.
    """
    block_size = pool.exact.shape[4]
    tables, is_seen = pool.tables.copy(), np.zeros((len(pool.pool), block_size), np.bool_)
    for row, (first, end) in enumerate(zip(firsts, pool.seq_lens, strict=True)):
        tokens = np.arange(first, end)
        is_seen[pool.tables[row, tokens // block_size], tokens % block_size] = True
        tables[row, : first // block_size] = NO_BLOCK
    stored = pool.pool.copy()
    if pool.kv_dtype is None:
        stored.swapaxes(1, 4)[~is_seen] = poison(pool.dtype, ())
    else:  # any bytes, and no number for a scale
        scales = stored[..., block_size * pool.head_size :].view(np.float32)
        scales.swapaxes(1, 4)[~is_seen] = np.nan
    return dataclasses.replace(pool, pool=stored, tables=tables)


def with_raised_keys(pool: BlockPool) -> BlockPool:
    """Return the pool with the keys from token RISE_AT on multiplied by a power of two."""
    values = pool.exact
    first = RISE_AT // values.shape[4]
    for row, seq_len in enumerate(pool.seq_lens):
        end = -(-int(seq_len) // values.shape[4])
        values[pool.tables[row, first:end], LAYER, 0] *= RISE[pool.dtype]
    return dataclasses.replace(pool, pool=to_pool(pool.dtype, pool.kv_dtype, values))


def draw_sinks(num_heads: int) -> Array:
    """Return sinks of heads, float32 [H]: among their scores, far above and far below in turns."""
    return np.resize(np.array([0.5, 2.0, 90.0, -1.0, -200.0], np.float32), num_heads)
