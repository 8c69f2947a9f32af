"""What tokens leave for attention over latents, and their queries; all but the products of heads.

LATENT_WRITE holds one operation a pool type: it normalises latents, rotates what turns beside them,
and writes both, as keys, and latents once more, as values. So each lies as attention reads it
(`kernels.cpu.kv_layout`): turning a super-block of keys into values in every step would take as
long as multiplying with them. `latent_queries` rotates the part of query heads that turns, and
scales all of them. Both go token by token (StepWord.TOKEN_CHUNKS).

Specification: `kernels.reference.latent_attention.write_latents`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from numba import types

from kernels.cpu.attention_sizes import PLACES_BYTES
from kernels.cpu.compiled import float32_at, inlined, int64_at, operation, scratch, word
from kernels.cpu.emitted import emitted
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS, VALUE_BYTES
from kernels.cpu.latent_operands import LatentQueries, LatentWrite
from kernels.cpu.operation import StepWord
from kernels.cpu.rope_tile import (
    STORE_CODES,
    copy_padded,
    norm_head,
    rotate_head,
    scale_row,
    store_bfloat16,
    store_float32,
)
from kernels.cpu.token_places import find_token_places
from kernels.cpu.vector_ir import F32, I32, LANES, Builder, Value

ONE: Final = types.float32(1)


@emitted(types.float32, types.int64)
def float_of_bits(builder: Builder, bits: Value) -> Value:
    """Return the float32 that has these bits."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


def _make_write_tokens(store_token: Callable[..., None], value_bytes: int) -> Any:  # noqa: ANN401
    """Return what writes a range of tokens into a pool whose values have `value_bytes`."""

    @inlined()
    def write_tokens(record: int, header: int, first: int, end: int, memory: int) -> None:
        rank, turning = word(record, LatentWrite.RANK), word(record, LatentWrite.TURNING)
        block_size = word(record, LatentWrite.BLOCK_SIZE)
        weight, epsilon = word(record, LatentWrite.WEIGHT), word(record, LatentWrite.EPSILON)
        first_token = word(header, StepWord.FIRST_TOKEN)
        kv_places = int64_at(word(header, StepWord.KV_PLACES))
        half, size = turning // 2, rank + turning
        padded, width = (size + LANES - 1) // LANES * LANES, (rank + LANES - 1) // LANES * LANES
        sub_blocks = (block_size + SUB_BLOCK_TOKENS - 1) // SUB_BLOCK_TOKENS
        sub_block_bytes = word(record, LatentWrite.HEAD_BYTES) // sub_blocks
        key, value = memory + PLACES_BYTES, memory + PLACES_BYTES + 4 * padded
        floats = float32_at(key)
        for i in range(size, padded):
            floats[i] = types.float32(0)
        for token in range(first, end):
            x = word(record, LatentWrite.INPUTS) + 4 * token * size
            row = 4 * half * (first_token + token)
            cosines = word(record, LatentWrite.COSINES) + row
            sines = word(record, LatentWrite.SINES) + row
            norm_head(x, weight, rank, epsilon, key)
            rotate_head(x + 4 * rank, cosines, sines, half, ONE, key + 4 * rank)
            copy_padded(key, rank, value)
            block = kv_places[token] // block_size
            offset = kv_places[token] - block * block_size
            sub, lane = offset // SUB_BLOCK_TOKENS, offset % SUB_BLOCK_TOKENS
            place = word(record, LatentWrite.POOL) + block * word(record, LatentWrite.BLOCK_BYTES)
            place += sub * sub_block_bytes
            find_token_places(place, lane, value_bytes, padded, width, memory)
            store_token(key, value, padded, width, memory)

    return write_tokens


_write_float32 = _make_write_tokens(store_float32, VALUE_BYTES["float32"])
_write_bfloat16 = _make_write_tokens(store_bfloat16, VALUE_BYTES["bfloat16"])
_write_int8 = _make_write_tokens(STORE_CODES["int8"], VALUE_BYTES["int8"])
_write_float8 = _make_write_tokens(STORE_CODES["float8"], VALUE_BYTES["float8"])


@operation()
def latent_write_float32(
    record: int, header: int, chunk: int, num_chunks: int, worker: int
) -> None:
    """Write what tokens leave into a float32 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_float32(record, header, first, end, scratch(header, worker))


@operation()
def latent_write_bfloat16(
    record: int, header: int, chunk: int, num_chunks: int, worker: int
) -> None:
    """Write what tokens leave into a bfloat16 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_bfloat16(record, header, first, end, scratch(header, worker))


@operation()
def latent_write_int8(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write what tokens leave into an int8 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_int8(record, header, first, end, scratch(header, worker))


@operation()
def latent_write_float8(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write what tokens leave into a float8 pool."""
    count = word(header, StepWord.NUM_TOKENS)
    first, end = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
    _write_float8(record, header, first, end, scratch(header, worker))


@operation()
def latent_queries(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Rotate and scale the queries of a run of tokens."""
    num_heads, plain = word(record, LatentQueries.NUM_HEADS), word(record, LatentQueries.PLAIN)
    rank, turning = word(record, LatentQueries.RANK), word(record, LatentQueries.TURNING)
    scale = float_of_bits(word(record, LatentQueries.SCALE))
    half = turning // 2
    first_token = word(header, StepWord.FIRST_TOKEN)
    num_tokens = word(header, StepWord.NUM_TOKENS)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        source = word(record, LatentQueries.SOURCE) + 4 * token * num_heads * (plain + turning)
        query = word(record, LatentQueries.QUERIES) + 4 * token * num_heads * (rank + turning)
        row = 4 * half * (first_token + token)
        cosines = word(record, LatentQueries.COSINES) + row
        sines = word(record, LatentQueries.SINES) + row
        for _ in range(num_heads):
            scale_row(query, rank, scale)
            rotate_head(source + 4 * plain, cosines, sines, half, scale, query + 4 * rank)
            source += 4 * (plain + turning)
            query += 4 * (rank + turning)
