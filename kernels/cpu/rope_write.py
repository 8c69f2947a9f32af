"""Rotary position embedding and the write of K and V into the pool; `kernels.reference.rope`.

`rope_angles` runs once a piece; `ROPE_WRITE` holds one operation a pool type, run in every layer.
Both go token by token (StepWord.TOKEN_CHUNKS). Queries come out scaled for attention: by
log2(e) / √D, because attention takes powers of 2 instead of e.

Where the record names a bias or norms of heads (`kernels.reference.rope.HeadChanges`), heads are
changed on their way, in scratch memory; where it names none, they are read where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from numba import types

from kernels.cpu.attention_sizes import PLACES_BYTES
from kernels.cpu.compiled import float32_at, inlined, int32_at, int64_at, operation, scratch, word
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS, VALUE_BYTES
from kernels.cpu.operands import RopeAngles, RopeWrite
from kernels.cpu.operation import StepWord
from kernels.cpu.rope_tile import (
    STORE_CODES,
    add_bias,
    copy_padded,
    norm_head,
    rotate_head,
    sines_of_position,
    store_bfloat16,
    store_float32,
)
from kernels.cpu.token_places import find_token_places

LOG2_E: Final = 1.4426950408889634


@operation()
def rope_angles(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write cosines and sines of the tokens' positions."""
    num_tokens = word(header, StepWord.NUM_TOKENS)
    positions = int32_at(word(header, StepWord.POSITIONS))
    half = word(record, RopeAngles.HALF)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        row = 4 * half * (word(header, StepWord.FIRST_TOKEN) + token)
        sines_of_position(
            positions[token],
            word(record, RopeAngles.FREQUENCIES),
            half,
            word(record, RopeAngles.FACTORS),
            word(record, RopeAngles.COSINES) + row,
            word(record, RopeAngles.SINES) + row,
        )


@inlined()
def changed_head(x: int, bias: int, weight: int, dim: int, epsilon: int, out: int) -> int:
    """Return where a head lies once its bias is added and it is normalised: at x, or at `out`.

    `bias`, `weight`: float32 [dim], or 0: not this.
    """
    if bias != 0:
        add_bias(x, bias, dim, out)
        x = out
    if weight != 0:
        norm_head(x, weight, dim, epsilon, out)
        x = out
    return x


def _make_write_tokens(store_token: Callable[..., None], value_bytes: int) -> Any:  # noqa: ANN401
    """Return what writes a range of tokens into a pool whose values have `value_bytes`."""

    @inlined()
    def write_tokens(record: int, header: int, first: int, end: int, memory: int) -> None:
        dim = word(record, RopeWrite.HEAD_DIM)
        num_heads = word(record, RopeWrite.NUM_HEADS)
        num_kv_heads = word(record, RopeWrite.NUM_KV_HEADS)
        block_size = word(record, RopeWrite.BLOCK_SIZE)
        head_bytes = word(record, RopeWrite.HEAD_BYTES)
        first_token = word(header, StepWord.FIRST_TOKEN)
        kv_places = int64_at(word(header, StepWord.KV_PLACES))
        half, padded = dim // 2, (dim + 15) // 16 * 16
        sub_blocks = (block_size + SUB_BLOCK_TOKENS - 1) // SUB_BLOCK_TOKENS
        scale = types.float32(LOG2_E / math.sqrt(dim))
        key, value = memory + PLACES_BYTES, memory + PLACES_BYTES + 4 * padded
        changed = value + 4 * padded
        query_norm, key_norm = word(record, RopeWrite.QUERY_NORM), word(record, RopeWrite.KEY_NORM)
        value_norm = word(record, RopeWrite.VALUE_NORM)
        epsilon = word(record, RopeWrite.EPSILON)
        growth, growth_length = (
            word(record, RopeWrite.GROWTH),
            word(record, RopeWrite.GROWTH_LENGTH),
        )
        positions = int32_at(word(header, StepWord.POSITIONS))
        floats = float32_at(key)
        for i in range(dim, padded):
            floats[i] = types.float32(0)
        for token in range(first, end):
            x = word(record, RopeWrite.QKV) + 4 * token * (num_heads + 2 * num_kv_heads) * dim
            cosines = word(record, RopeWrite.COSINES) + 4 * half * (first_token + token)
            sines = word(record, RopeWrite.SINES) + 4 * half * (first_token + token)
            out = word(record, RopeWrite.QUERIES) + 4 * (first_token + token) * num_heads * dim
            bias = word(record, RopeWrite.BIAS)
            step = 4 * dim if bias != 0 else 0
            query_scale = scale
            if growth != 0:
                query_scale = scale * float32_at(growth)[positions[token] // growth_length]
            for head in range(num_heads):
                shift = 4 * dim * head
                query = changed_head(x + shift, bias, query_norm, dim, epsilon, changed)
                rotate_head(query, cosines, sines, half, query_scale, out + shift)
                bias += step
            block = kv_places[token] // block_size
            offset = kv_places[token] - block * block_size
            sub, lane = offset // SUB_BLOCK_TOKENS, offset % SUB_BLOCK_TOKENS
            sub_block = word(record, RopeWrite.POOL) + block * word(record, RopeWrite.BLOCK_BYTES)
            sub_block += sub * (head_bytes // sub_blocks)
            x += 4 * num_heads * dim
            for _ in range(num_kv_heads):
                own_key = changed_head(x, bias, key_norm, dim, epsilon, changed)
                rotate_head(own_key, cosines, sines, half, types.float32(1), key)
                own_value = changed_head(
                    x + 4 * num_kv_heads * dim, bias + num_kv_heads * step, value_norm, dim,
                    epsilon, changed,
                )  # fmt: skip
                copy_padded(own_value, dim, value)
                bias += step
                find_token_places(sub_block, lane, value_bytes, padded, padded, memory)
                store_token(key, value, padded, padded, memory)
                sub_block += head_bytes
                x += 4 * dim

    return write_tokens


_write_float32 = _make_write_tokens(store_float32, VALUE_BYTES["float32"])
_write_bfloat16 = _make_write_tokens(store_bfloat16, VALUE_BYTES["bfloat16"])
_write_int8 = _make_write_tokens(STORE_CODES["int8"], VALUE_BYTES["int8"])
_write_float8 = _make_write_tokens(STORE_CODES["float8"], VALUE_BYTES["float8"])


@operation()
def rope_write_float32(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write queries, and keys and values into a float32 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_float32(record, header, first, end, scratch(header, worker))


@operation()
def rope_write_bfloat16(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write queries, and keys and values into a bfloat16 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_bfloat16(record, header, first, end, scratch(header, worker))


@operation()
def rope_write_int8(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write queries, and keys and values into an int8 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_int8(record, header, first, end, scratch(header, worker))


@operation()
def rope_write_float8(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write queries, and keys and values into a float8 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_float8(record, header, first, end, scratch(header, worker))
