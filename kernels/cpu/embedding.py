"""Embedding: rows of a packed matrix, decoded into the hidden states of a piece's tokens.

An embedding is packed like any other matrix, since with tied weights it is also the matrix of the
logits: token v is column v mod 16 of panel v div 16 (`float_packing`, `int8_packing`). What is
decoded is exact: every stored weight is a float32, and so is q · d of 8-bit q and float16 d.

Operands: `EmbeddingRecord`. Chunks go token by token (StepWord.TOKEN_CHUNKS).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types

from kernels.cpu.compiled import float32_at, inlined, int8_at, int32_at, operation, uint8_at, word
from kernels.cpu.emitted import emitted
from kernels.cpu.float_packing import AMX_DEPTH
from kernels.cpu.int8_packing import GROUP, INT8_FORMATS, PANEL_COLUMNS, VECTOR_BYTES
from kernels.cpu.operands import EmbeddingRecord
from kernels.cpu.operation import StepWord
from kernels.cpu.vector_ir import F32, I16, I32, Builder, Value, load


@emitted(types.float32, types.int64)
def float16_at(builder: Builder, address: Value) -> Value:
    """Return the finite float16 at an address as float32; exact, by integer arithmetic.

    Exponent and fraction, moved to their places in a float32, are the value times 2^-112.
    """
    bits = builder.zext(load(builder, address, I16, align=2), I32)
    magnitude = builder.shl(builder.and_(bits, ir.Constant(I32, 0x7FFF)), ir.Constant(I32, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, F32), ir.Constant(F32, 2.0**112))
    sign = builder.shl(builder.and_(bits, ir.Constant(I32, 0x8000)), ir.Constant(I32, 16))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, I32), sign), F32)


@emitted(types.float32, types.int64)
def bfloat16_at(builder: Builder, address: Value) -> Value:
    """Return the bfloat16 at an address as float32."""
    bits = builder.zext(load(builder, address, I16, align=2), I32)
    return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)


def _rows_of(decode: Any, depth: int, depth_bytes: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the kernel for panels made of parts `depth` k's deep, of `depth_bytes` bytes.

    `decode`: void(panel, lane, k, out), writes the k elements of a lane of a panel.
    """

    @inlined()
    def embed(record: int, header: int, chunk: int, num_chunks: int) -> None:
        weights, k = word(record, EmbeddingRecord.WEIGHTS), word(record, EmbeddingRecord.K)
        num_tokens = word(header, StepWord.NUM_TOKENS)
        first_token = word(header, StepWord.FIRST_TOKEN)
        token_ids = carray(int32_at(word(header, StepWord.TOKEN_IDS)), num_tokens)
        panel_bytes = (k + depth - 1) // depth * depth_bytes
        first, end = num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks
        for token in range(first, end):
            token_id = types.int64(token_ids[token])
            out = word(record, EmbeddingRecord.OUT) + 4 * (first_token + token) * k
            panel = weights + token_id // PANEL_COLUMNS * panel_bytes
            decode(panel, token_id % PANEL_COLUMNS, k, out)

    return embed


@inlined()
def _decode_f32(panel: int, lane: int, k: int, out: int) -> None:
    source = carray(float32_at(panel), (k, PANEL_COLUMNS))
    target = carray(float32_at(out), k)
    for i in range(k):
        target[i] = source[i, lane]


@inlined()
def _decode_f16(panel: int, lane: int, k: int, out: int) -> None:
    target = carray(float32_at(out), k)
    for i in range(k):
        target[i] = float16_at(panel + 2 * (i * PANEL_COLUMNS + lane))


@inlined()
def _decode_bf16(panel: int, lane: int, k: int, out: int) -> None:
    target = carray(float32_at(out), k)
    for i in range(k):
        pair = i // 2 * PANEL_COLUMNS + lane
        target[i] = bfloat16_at(panel + 2 * (2 * pair + i % 2))


def _int8_decoder(label: str) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the decoder of a quantised format's tiles."""
    fmt = INT8_FORMATS[label]
    tile_bytes, scales_at, minima_at = fmt.tile_bytes, fmt.scales_at, fmt.minima_at
    num_vectors, offset = fmt.num_vectors, fmt.offset
    has_minimum, is_nibbles = fmt.has_minimum, fmt.is_nibbles

    @inlined()
    def decode(panel: int, lane: int, k: int, out: int) -> None:
        target = carray(float32_at(out), k)
        for group in range(k // GROUP):
            tile = panel + group * tile_bytes
            scale = float16_at(tile + scales_at + 2 * lane)
            minimum = types.float32(0.0)
            if has_minimum:
                minimum = float16_at(tile + minima_at + 2 * lane)
            for vector in range(num_vectors):
                place = tile + vector * VECTOR_BYTES + 4 * lane
                i = group * GROUP + 4 * vector
                if is_nibbles:
                    packed = carray(uint8_at(place), 4)
                    for j in range(4):
                        low, high = types.int32(packed[j] & 15), types.int32(packed[j] >> 4)
                        target[i + j] = types.float32(low - offset) * scale + minimum
                        target[i + j + 16] = types.float32(high - offset) * scale + minimum
                else:
                    q = carray(int8_at(place), 4)
                    for j in range(4):
                        target[i + j] = types.float32(q[j]) * scale
        return

    return decode


_f32 = _rows_of(_decode_f32, 1, 4 * PANEL_COLUMNS)
_f16 = _rows_of(_decode_f16, 1, 2 * PANEL_COLUMNS)
_bf16 = _rows_of(_decode_bf16, AMX_DEPTH, 2 * AMX_DEPTH * PANEL_COLUMNS)
_q4_1 = _rows_of(_int8_decoder("Q4_1"), GROUP, INT8_FORMATS["Q4_1"].tile_bytes)
_q4_0 = _rows_of(_int8_decoder("Q4_0"), GROUP, INT8_FORMATS["Q4_0"].tile_bytes)
_q8_0 = _rows_of(_int8_decoder("Q8_0"), GROUP, INT8_FORMATS["Q8_0"].tile_bytes)


@operation()
def embedding_f32(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
    """Write the tokens' rows of an F32 matrix."""
    _f32(record, header, chunk, num_chunks)


@operation()
def embedding_f16(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
    """Write the tokens' rows of an F16 matrix."""
    _f16(record, header, chunk, num_chunks)


@operation()
def embedding_bf16(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
    """Write the tokens' rows of a BF16 matrix."""
    _bf16(record, header, chunk, num_chunks)


@operation()
def embedding_q4_1(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
    """Write the tokens' rows of a Q4_1 matrix."""
    _q4_1(record, header, chunk, num_chunks)


@operation()
def embedding_q4_0(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
    """Write the tokens' rows of a Q4_0 matrix."""
    _q4_0(record, header, chunk, num_chunks)


@operation()
def embedding_q8_0(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
    """Write the tokens' rows of a Q8_0 matrix."""
    _q8_0(record, header, chunk, num_chunks)
