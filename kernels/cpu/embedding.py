"""Embedding: rows of a packed matrix, decoded into the hidden states of a piece's tokens.

An embedding is packed like any other matrix, since with tied weights it is also the matrix of the
logits: token v is column v mod 16 of panel v div 16 (`float_packing`, `int8_packing`). What is
decoded is exact: every stored weight is a float32, and so is q · d of 8-bit q and float16 d; of
shared scales, q · (d · s) and the minimum are rounded once, as their definition has it. What is
multiplied by a scale besides is rounded once more.

Operands: `EmbeddingRecord`. Chunks go token by token (StepWord.TOKEN_CHUNKS).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray, types

from kernels.cpu.catalogue import EMBEDDINGS
from kernels.cpu.compiled import define, float32_at, inlined, int8_at, int32_at, uint8_at, word
from kernels.cpu.emitted import emitted
from kernels.cpu.float_packing import AMX_DEPTH
from kernels.cpu.int8_packing import (
    GROUP,
    INT8_FORMATS,
    PANEL_COLUMNS,
    SHARED_GROUPS,
    VECTOR_BYTES,
    Int8Format,
    Scales,
)
from kernels.cpu.int8_weights import panel_sizer
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


def _panels_of(part_bytes: int) -> Any:  # noqa: ANN401 - Numba's objects
    """Return int64(parts), the bytes of a panel of so many parts of `part_bytes` bytes."""

    @inlined()
    def size(parts: int) -> int:
        return parts * part_bytes

    return size


def _rows_of(decode: Any, panel_size: Any, depth: int = GROUP) -> Callable[..., None]:  # noqa: ANN401 - Numba's objects
    """Return the kernel for panels made of parts `depth` k's deep, `panel_size`(parts) bytes.

    `decode`: void(panel, lane, k, out), writes the k elements of a lane of a panel.
    """

    def embed(record: int, header: int, chunk: int, num_chunks: int, _worker: int) -> None:
        weights, k = word(record, EmbeddingRecord.WEIGHTS), word(record, EmbeddingRecord.K)
        num_tokens = word(header, StepWord.NUM_TOKENS)
        first_token = word(header, StepWord.FIRST_TOKEN)
        token_ids = carray(int32_at(word(header, StepWord.TOKEN_IDS)), num_tokens)
        panel_bytes = panel_size((k + depth - 1) // depth)
        is_scaled = word(record, EmbeddingRecord.SCALE) != 0
        scale = carray(float32_at(record + 8 * EmbeddingRecord.SCALE), 1)[0]
        first, end = num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks
        for token in range(first, end):
            token_id = types.int64(token_ids[token])
            out = word(record, EmbeddingRecord.OUT) + 4 * (first_token + token) * k
            panel = weights + token_id // PANEL_COLUMNS * panel_bytes
            decode(panel, token_id % PANEL_COLUMNS, k, out)
            if is_scaled:
                row = carray(float32_at(out), k)
                for i in range(k):
                    row[i] *= scale

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


def _shared_scale(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what reads a column's scale and minimum: (record, tile's place, part, lane)."""
    shared_at, parts = fmt.shared_at, fmt.parts
    high_at = SHARED_GROUPS * PANEL_COLUMNS
    upper_at = high_at // 2

    @inlined()
    def small(record: int, place: int, part: int, lane: int) -> tuple[float, float]:
        at = record + (place * parts + part) * PANEL_COLUMNS + lane
        s = types.float32(carray(int8_at(at), 1)[0])
        return s * float16_at(record + shared_at + 2 * lane), types.float32(0.0)

    @inlined()
    def six_bits(record: int, place: int, _part: int, lane: int) -> tuple[float, float]:
        low = types.int32(carray(uint8_at(record + place * PANEL_COLUMNS + lane), 1)[0])
        high_place = record + high_at + place // 2 * PANEL_COLUMNS + lane
        high = types.int32(carray(uint8_at(high_place), 1)[0]) >> (4 * (place & 1))
        s, n = (low & 15) | (high & 3) << 4, (low >> 4) | (high & 12) << 2
        d = float16_at(record + shared_at + 2 * lane)
        dmin = float16_at(record + shared_at + 2 * (PANEL_COLUMNS + lane))
        return d * types.float32(s), -(dmin * types.float32(n))

    @inlined()
    def signed_six_bits(record: int, place: int, _part: int, lane: int) -> tuple[float, float]:
        low_at = record + place // 2 * PANEL_COLUMNS + lane
        low = types.int32(carray(uint8_at(low_at), 1)[0]) >> (4 * (place & 1))
        twos_at = record + upper_at + place // 4 * PANEL_COLUMNS + lane
        upper = types.int32(carray(uint8_at(twos_at), 1)[0]) >> (2 * (place & 3))
        s = types.float32(((low & 15) | (upper & 3) << 4) - 32)
        return s * float16_at(record + shared_at + 2 * lane), types.float32(0.0)

    if fmt.scales is Scales.SHARED_SIX_BITS:
        return signed_six_bits
    return six_bits if fmt.has_minimum else small


def _own_scale(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what reads a column's scale and minimum: (tile, 0, 0, lane)."""
    scales_at, minima_at, has_minimum = fmt.scales_at, fmt.minima_at, fmt.has_minimum

    @inlined()
    def scale_of(tile: int, _place: int, _part: int, lane: int) -> tuple[float, float]:
        minimum = types.float32(0.0)
        if has_minimum:
            minimum = float16_at(tile + minima_at + 2 * lane)
        return float16_at(tile + scales_at + 2 * lane), minimum

    return scale_of


def _int8_decoder(label: str) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the decoder of a quantised format's panels."""
    fmt = INT8_FORMATS[label]
    tile_bytes, record_bytes, is_shared = fmt.tile_bytes, fmt.record_bytes, fmt.is_shared
    low_vectors, offset, is_nibbles = fmt.low_vectors, fmt.offset, fmt.is_nibbles
    high_bits, depth = fmt.high_bits, fmt.depth
    codes, has_codes = fmt.values, fmt.codes is not None
    high_mask = (1 << high_bits) - 1
    scale_of = _shared_scale(fmt) if is_shared else _own_scale(fmt)

    @inlined()
    def weight(tile: int, lane: int, i: int) -> Any:  # noqa: ANN401 - int32
        if not is_nibbles:
            place = tile + i // 4 * VECTOR_BYTES + 4 * lane + i % 4
            return types.int32(carray(int8_at(place), 1)[0])
        place = tile + i % 16 // 4 * VECTOR_BYTES + 4 * lane + i % 4
        q = types.int32(carray(uint8_at(place), 1)[0]) >> (4 * (i // 16)) & 15
        if high_bits != 0:
            bit = high_bits * (i // 4)
            high_at = tile + (low_vectors + bit // 8) * VECTOR_BYTES + 4 * lane + i % 4
            upper = types.int32(carray(uint8_at(high_at), 1)[0]) >> (bit % 8) & high_mask
            q |= upper << 4
        if has_codes:
            return types.int32(codes[q])
        return q - offset

    @inlined()
    def decode(panel: int, lane: int, k: int, out: int) -> None:
        target = carray(float32_at(out), k)
        groups = k // GROUP
        for group in range(groups):
            tile = panel + group * tile_bytes
            scales_at, place = tile, 0
            if is_shared:
                record = group // SHARED_GROUPS
                scales_at = panel + groups * tile_bytes + record * record_bytes
                place = group % SHARED_GROUPS
            for part in range(GROUP // depth):
                scale, minimum = scale_of(scales_at, place, part, lane)
                for i in range(part * depth, (part + 1) * depth):
                    q = types.float32(weight(tile, lane, i))
                    target[group * GROUP + i] = q * scale + minimum
        return

    return decode


define(EMBEDDINGS["F32"], _rows_of(_decode_f32, _panels_of(4 * PANEL_COLUMNS), 1))
define(EMBEDDINGS["F16"], _rows_of(_decode_f16, _panels_of(2 * PANEL_COLUMNS), 1))
define(
    EMBEDDINGS["BF16"], _rows_of(_decode_bf16, _panels_of(2 * AMX_DEPTH * PANEL_COLUMNS), AMX_DEPTH)
)
for _label, _fmt in INT8_FORMATS.items():
    define(EMBEDDINGS[_label], _rows_of(_int8_decoder(_label), panel_sizer(_fmt)))
