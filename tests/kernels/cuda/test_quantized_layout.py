"""The layout of quantised weights for the tensor cores: as drawn, and nothing is lost in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.gpu.cases.quantized_matmul import draw_matrix
from compute_plane.model.dequantize import decode_rows
from kernels.cuda.eight_bit_floats import FINITE
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.four_bit_floats import DOUBLED, placed, taken_up
from kernels.cuda.k_quant_layout import BLOCK_BYTES as APART
from kernels.cuda.quantized_formats import FORMATS, label_for, packed_bytes
from kernels.cuda.quantized_layout import pack_matrix, pack_rows, unpack_matrix
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.reference.quantized_kv import from_float8
from kernels.reference.quantized_matmul import quantized_matmul

OWN = [label for label, fmt in FORMATS.items() if fmt.kind not in APART]
"""Formats that `test_k_quant_layout` is not about."""
NUMBERS = (("m", "<f2"), ("z", "i1"))
BLOCK_BYTES = {
    "Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_Z": 19, "Q8_Z": 35, "MXFP4": 17, "FP8": 36
}  # fmt: skip


def draw_rows(label: str, num_outputs: int, num_spans: int) -> np.ndarray:
    """Draw rows in blocks; scales are finite, those of a span the same."""
    fmt, rng = FORMATS[label], np.random.default_rng(num_outputs)
    num_blocks = num_spans * fmt.span_tiles
    blocks = rng.integers(0, 256, (num_outputs, num_blocks, BLOCK_BYTES[fmt.kind]), np.uint8)
    if fmt.kind == "FP8":
        blocks[..., 4:] = rng.choice(FINITE, blocks[..., 4:].shape)
        scales = rng.standard_normal((num_outputs, num_spans, 1)).astype("<f4").view(np.uint8)
        blocks[..., :4] = np.repeat(scales, fmt.span_tiles, axis=1)
        return blocks.reshape(num_outputs, -1)
    if fmt.is_float:
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:2])
        return blocks.reshape(num_outputs, -1)
    num_scales = 2 if fmt.has_minimum else 1
    scales = rng.standard_normal((num_outputs, num_spans, num_scales)).astype("<f2")
    beside = [scales.view(np.uint8)]
    if fmt.has_zeros:
        beside.append(rng.integers(0, 2**fmt.bits, (num_outputs, num_spans, 1), np.uint8))
    numbers = np.concatenate(beside, axis=-1)
    blocks[..., : numbers.shape[-1]] = np.repeat(numbers, fmt.span_tiles, axis=1)
    return blocks.reshape(num_outputs, -1)


def split_rows(label: str, rows: np.ndarray) -> QuantizedMatrix:
    """Take rows of blocks apart as model files have them, the numbers block by block."""
    fmt = FORMATS[label]
    if fmt.kind == "FP8":
        blocks = rows.view(np.dtype([("s", "<f4"), ("q", "u1", 32)]))
        return QuantizedMatrix(from_float8(blocks["q"]).reshape(len(rows), -1), blocks["s"])
    if fmt.is_float:
        blocks = rows.reshape(len(rows), -1, BLOCK_BYTES[label])
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
        return QuantizedMatrix(DOUBLED[codes.reshape(len(rows), -1)], scales)
    beside = [("m", "<f2")] if fmt.has_minimum else [("z", "i1")] if fmt.has_zeros else []
    blocks = rows.view(np.dtype([("d", "<f2"), *beside, ("q", "u1", 4 * fmt.bits)]))
    stored = blocks["q"]
    if fmt.bits == 4:  # byte j of a block holds k = j in its low half, k = j + 16 in its high half
        stored = np.concatenate([stored & 15, stored >> 4], axis=-1)
    quants = stored.reshape(len(rows), -1).view(np.int8) - np.int8(fmt.offset)
    numbers = [blocks[name] if (name, dtype) in beside else None for name, dtype in NUMBERS]
    return QuantizedMatrix(quants, blocks["d"], *numbers)


def assert_same(found: QuantizedMatrix, expected: QuantizedMatrix, repeats: int = 1) -> None:
    """`repeats`: so many numbers of `expected` are one of `found`."""
    np.testing.assert_array_equal(found.quants, expected.quants)
    for name in ("scales", "minima", "zeros", "whole_scales", "whole_minima"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(np.repeat(one, repeats, axis=1), other)


@pytest.mark.parametrize(
    ("label", "num_outputs", "num_spans"),
    [
        *((label, 70, 3) for label in FORMATS),
        *(("Q4_Z_G64", *shape) for shape in [(32, 1), (1, 2), (96, 5)]),
    ],
)
def test_what_is_packed_can_be_unpacked_exactly(label, num_outputs, num_spans):
    matrix = draw_matrix(np.random.default_rng(0), label, num_outputs, num_spans)
    num_inputs = matrix.quants.shape[1]

    packed = pack_matrix(label, matrix)

    assert packed.shape == (packed_bytes(label, num_outputs, num_inputs),)
    assert_same(unpack_matrix(label, packed, num_outputs, num_inputs), matrix)


@pytest.mark.parametrize("label", OWN)
def test_rows_of_blocks_keep_their_values(label, monkeypatch):
    fmt, num_outputs = FORMATS[label], 75
    num_inputs = 2 * fmt.span
    panel = 32 * num_inputs
    monkeypatch.setattr("kernels.cuda.quantized_layout.PACKED_AT_ONCE", panel)  # a panel each
    rows = draw_rows(label, num_outputs, 2)
    decoded = np.empty((num_outputs, num_inputs), np.float32)
    decode_rows(rows, fmt.kind, decoded, path=Path("model"), name="w")

    packed = pack_rows(label, rows, num_inputs)
    found = unpack_matrix(label, packed, num_outputs, num_inputs)

    assert_same(found, split_rows(label, rows), fmt.span_tiles)
    out = np.empty((num_inputs, num_outputs))
    quantized_matmul(np.eye(num_inputs), *found.operands, out)
    np.testing.assert_allclose(out.T, decoded, rtol=1e-6, atol=1e-6 * np.abs(decoded).max())


@pytest.mark.parametrize("label", [label for label in OWN if not FORMATS[label].is_float])
def test_a_weight_lies_where_the_drawing_has_it(label):
    fmt = FORMATS[label]
    panel, tile, row, k = 1, fmt.span_tiles, 21, 13  # of span 1; i = 2, group 5; quad 1, e = 5
    quants = np.full((64, 3 * fmt.span), -fmt.offset, np.int8)
    quants[32 * panel + row, 32 * tile + k] = 1 - fmt.offset
    scales = np.zeros((64, 3), np.float16)
    scales[32 * panel + row, 1] = 1.0
    minima = 2 * scales if fmt.has_minimum else None
    zeros = 3 * scales.astype(np.int8) if fmt.has_zeros else None

    packed = pack_matrix(label, QuantizedMatrix(quants, scales, minima, zeros))

    found = packed.reshape(2, -1)[panel]
    expected = np.zeros_like(found)
    weights, spans = np.split(expected, [fmt.scales_at(3 * fmt.span)])
    i, group = divmod(row, 8)
    quad, e = divmod(k, 8)
    lane = 4 * group + quad
    if fmt.bits == 4:
        words = weights.view("<u4").reshape(-1, 32, 4)
        words[tile, lane, i] = 1 << (4 * (e // 2) + 16 * (e % 2))
    else:
        stored = weights.view(np.int8).reshape(-1, 2, 32, 2, 2, 4)  # i // 2, lane, i % 2, word
        stored[tile, i // 2, lane, i % 2, e // 4, [0, 2, 1, 3][e % 4]] = 1
    span = spans[fmt.span_bytes : 2 * fmt.span_bytes]
    numbers = span[: fmt.zeros_at].view("<f2").reshape(8, -1, 4)
    numbers[group, 0, i] = 1.0
    if fmt.has_minimum:
        numbers[group, 1, i] = 2.0
    if fmt.has_zeros and fmt.bits == 4:
        span[64:].view("<u2")[group] = 3 << 4 * i
    elif fmt.has_zeros:
        span[64 + 4 * group + i] = 3
    np.testing.assert_array_equal(found, expected)


def test_a_four_bit_float_lies_where_the_drawing_has_it():
    """Row 21: i = 2, group 5. k's 8 … 15 are quad 1; e = 0, 1 are pair 0 and so on."""
    quants, scales = np.zeros((64, 96), np.int8), np.full((64, 3), 0.5, np.float32)
    codes = {8: -6, 11: 1, 12: -12, 15: 3}  # −3: s, 1 0 1; ½: 0 0 1; −6: s, 1 1 1; 1½: 0 1 1
    for k, doubled in codes.items():
        quants[32 + 21, 32 + k] = doubled
    scales[32 + 21, 1] = 2.0

    packed = pack_matrix("MXFP4", QuantizedMatrix(quants, scales))

    weights, spans = np.split(packed.reshape(2, -1)[1], [FORMATS["MXFP4"].scales_at(96)])
    expected = np.zeros((3, 32, 4), np.uint32)
    pairs = [
        1 << 15 | 1 << 8 | 1 << 6,
        1 << 16 + 6 + 3,
        1 << 15 + 6 | 1 << 8 + 6 | 1 << 7 + 6 | 1 << 6 + 6,
        1 << 16 + 0 | 1 << 16 + 4,
    ]
    expected[1, 4 * 5 + 1, 2] = np.bitwise_or.reduce(pairs)
    np.testing.assert_array_equal(weights.view("<u4").reshape(expected.shape), expected)
    stored = spans[: 3 * 32].reshape(3, 8, 4)
    assert stored[1, 5, 2] == 129
    assert (np.delete(stored.reshape(-1), 32 + 4 * 5 + 2) == 127).all()


@pytest.mark.parametrize("label", ["FP8", "FP8_G128"])
def test_an_eight_bit_float_lies_where_the_drawing_has_it(label):
    """Row 21 of the second panel: i = 2, group 5. k = 13: quad 1, e = 5."""
    fmt = FORMATS[label]
    quants, scales = np.zeros((64, 3 * fmt.span), np.float32), np.zeros((64, 3), np.float32)
    quants[32 + 21, fmt.span + 13] = -0.75  # s, 0110, 100
    scales[32 + 21, 1] = np.float32(1 / 3)

    packed = pack_matrix(label, QuantizedMatrix(quants, scales)).reshape(2, -1)

    expected = np.zeros_like(packed)
    weights, spans = np.split(expected[1], [fmt.scales_at(3 * fmt.span)])
    codes = weights.reshape(-1, 2, 32, 2, 2, 4)  # i // 2, lane, i % 2, word of e
    codes[fmt.span_tiles, 1, 4 * 5 + 1, 0, 1, 2] = 0b1_0110_100
    spans[128:256].view("<f4").reshape(8, 4)[5, 2] = np.float32(1 / 3)
    np.testing.assert_array_equal(packed, expected)


def test_every_word_of_codes_is_taken_up_as_it_was_placed():
    words = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32)
    np.testing.assert_array_equal(taken_up(placed(words)), words)
    np.testing.assert_array_equal(placed(taken_up(words)), words)


@pytest.mark.parametrize("label", FORMATS)
def test_every_panel_begins_with_a_line_and_has_the_bits_that_the_table_says(label):
    table = {
        "Q4_0": 4.5, "Q4_0_G64": 4.25, "Q4_0_G128": 4.125, "Q4_1": 5,
        "Q4_Z": 4.625, "Q4_Z_G64": 4.3125, "Q4_Z_G128": 4.15625,
        "Q8_0": 8.5, "Q8_0_G64": 8.25, "Q8_0_G128": 8.125,
        "Q8_Z": 8.75, "Q8_Z_G64": 8.375, "Q8_Z_G128": 8.1875, "MXFP4": 4.25,
        "FP8": 9, "FP8_G128": 8.25, "Q5_0": 5.5, "Q5_1": 6,
        "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625,
    }  # fmt: skip
    for num_inputs in (256, 2048, 4096, 11008, 14336):
        num_bytes = FORMATS[label].panel_bytes(num_inputs)
        assert num_bytes % 128 == 0
        assert 0 <= num_bytes - table[label] * 4 * num_inputs < 128
    assert FORMATS[label].bits_of_weight == table[label]


def test_the_span_is_the_largest_that_a_group_fills():
    groups = (32, 64, 96, 128, 192, 256, 4096, 11008)
    assert [label_for("Q4_Z", group).partition("_G")[2] for group in groups] == [
        "", "64", "", "128", "64", "128", "128", "128"
    ]  # fmt: skip
    assert label_for("Q4_1", 128) == "Q4_1"
    assert [label_for("FP8", group) for group in (64, 192, 256)] == ["FP8", "FP8", "FP8_G128"]
    with pytest.raises(UnsupportedVariantError, match="group must be a multiple of 32 for Q4_0"):
        label_for("Q4_0", 16)


@pytest.mark.parametrize(
    ("label", "group"),
    [("Q4_1", 64), ("Q4_Z", 256), ("Q4_Z_G64", 128), ("Q8_0_G128", 256), ("FP8", 128),
     ("FP8_G128", 256)],
)  # fmt: skip
def test_a_scale_for_more_than_a_span_is_repeated(label, group):
    rng, fmt = np.random.default_rng(1), FORMATS[label]
    quants = rng.integers(0, 16, (32, 256), np.int8)
    scales = rng.uniform(1, 2, (32, 256 // group)).astype(np.float16)
    minima = -8 * scales if fmt.has_minimum else None
    zeros = rng.integers(0, 16, scales.shape, np.int8) if fmt.has_zeros else None
    matrix = QuantizedMatrix(quants, scales, minima, zeros)

    found = unpack_matrix(label, pack_matrix(label, matrix), 32, 256)

    assert found.scales.shape == (32, 256 // fmt.span)
    out, expected = np.empty((256, 32)), np.empty((256, 32))
    for one, values in ((found, out), (matrix, expected)):
        quantized_matmul(np.eye(256), *one.operands, values)
    np.testing.assert_array_equal(out, expected)


def floats_of(doubled: int, scale: float) -> QuantizedMatrix:
    return QuantizedMatrix(np.full((2, 32), doubled, np.int8), np.full((2, 1), scale, np.float32))


def matrix_of(num_inputs: int, num_scales: int, *, highest: int = 7, minima: bool = False, zero=0):
    scales = np.ones((16, num_scales), np.float16)
    quants = np.full((16, num_inputs), highest, np.int16)
    zeros = np.full(scales.shape, zero, np.int16) if zero else None
    return QuantizedMatrix(quants, scales, scales if minima else None, zeros)


def rows_with(label: str, block: int, byte: int, value: int):
    rows = draw_rows(label, 3, 2)
    rows.reshape(3, -1, BLOCK_BYTES[FORMATS[label].kind])[1, block, byte] = value
    return rows


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda: packed_bytes("Q2_K", 16, 256), "weights must be one of Q8_0, Q8_0_G64, Q8_0_G128"),
        (lambda: packed_bytes("Q4_0", 16, 48), "num_inputs must be a multiple of 32, got 48"),
        (lambda: packed_bytes("Q4_0", 16, 0), "num_inputs must be a multiple of 32, got 0"),
        (lambda: packed_bytes("Q4_Z_G128", 16, 64), "num_inputs must be a multiple of 128, got 64"),
        (lambda: pack_matrix("Q4_0", matrix_of(96, 2)), "group must be one of 32 .* got 48.0"),
        (lambda: pack_matrix("Q4_0", matrix_of(96, 4)), "group must be one of 32 .* got 24.0"),
        (lambda: pack_matrix("Q4_0_G64", matrix_of(128, 4)), "group must be one of 64 .* got 32.0"),
        (lambda: pack_matrix("Q4_0", matrix_of(64, 1, minima=True)), "minima must be absent for"),
        (lambda: pack_matrix("Q4_1", matrix_of(64, 1)), "minima must be given for Q4_1"),
        (lambda: pack_matrix("Q4_0", matrix_of(64, 1, zero=1)), "zeros must be absent for Q4_0"),
        (lambda: pack_matrix("Q4_Z", matrix_of(64, 1)), "zeros must be given for Q4_Z"),
        (lambda: pack_matrix("Q4_Z", matrix_of(64, 1, zero=16)), "zeros must be between 0 and 15"),
        (lambda: pack_matrix("Q8_Z", matrix_of(64, 1, zero=128)), "zeros must be between -128 "),
        (lambda: pack_matrix("MXFP4", floats_of(5, 0.5)), "quants must be twice a float"),
        (lambda: pack_matrix("MXFP4", floats_of(4, 0.75)), "scales must be a power of two"),
        (lambda: pack_matrix("MXFP4", floats_of(4, 2.0**127)), "scales must be a power of two"),
        (lambda: pack_matrix("FP8", floats_of(17, 0.5)), "be a float of eight bits, got 17"),
        (lambda: pack_matrix("FP8", matrix_of(64, 1, highest=480)), "float of eight bits, got 480"),
        (lambda: pack_rows("FP8_G128", rows_with("FP8_G128", 2, 3, 9), 256),
         "s must be one for a span of 128, got"),
        (lambda: pack_matrix("Q4_0", matrix_of(64, 1, highest=8)), "quants must be between -8 "),
        (lambda: pack_matrix("Q8_0", matrix_of(64, 1, highest=128)), "between -128 and 127"),
        (lambda: pack_rows("Q8_0", np.zeros((1, 33), np.uint8), 32), "rows must be of 34 bytes"),
        (lambda: pack_rows("Q4_0_G64", rows_with("Q4_0_G64", 1, 1, 0x7C), 128),
         r"d must be one for a span of 64, got \(.*, .*\)"),
        (lambda: pack_rows("Q8_Z_G64", rows_with("Q8_Z_G64", 3, 2, 77), 128),
         r"z must be one for a span of 64, got \(.*, 77\)"),
        (lambda: pack_rows("Q4_Z", rows_with("Q4_Z", 1, 2, 16), 64), "z must be between 0 and 15"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_the_layout_is_refused_by_name(pack, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        pack()
