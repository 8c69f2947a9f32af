"""The layout of quantised weights for the tensor cores: as drawn, and nothing is lost in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.gpu.cases.quantized_matmul import draw_matrix
from compute_plane.model.dequantize import decode_rows
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_layout import (
    FORMATS,
    QuantizedMatrix,
    pack_matrix,
    pack_rows,
    packed_bytes,
    split_rows,
    unpack_matrix,
)
from kernels.reference.quantized_matmul import quantized_matmul

BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def draw_rows(label: str, num_outputs: int, num_groups: int) -> np.ndarray:
    """Draw rows as a model file has them; scales are finite."""
    rng = np.random.default_rng(num_outputs)
    blocks = rng.integers(0, 256, (num_outputs, num_groups, BLOCK_BYTES[label]), np.uint8)
    num_scales = 2 if label == "Q4_1" else 1
    scales = rng.standard_normal((num_outputs, num_groups, num_scales)).astype("<f2")
    blocks[..., : 2 * num_scales] = scales.view(np.uint8)
    return blocks.reshape(num_outputs, -1)


def assert_same(found: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    np.testing.assert_array_equal(found.quants, expected.quants)
    np.testing.assert_array_equal(found.scales, expected.scales)
    assert (found.minima is None) == (expected.minima is None)
    if expected.minima is not None:
        np.testing.assert_array_equal(found.minima, expected.minima)


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize(("num_outputs", "num_groups"), [(32, 1), (70, 3), (1, 2), (96, 5)])
def test_what_is_packed_can_be_unpacked_exactly(label, num_outputs, num_groups):
    matrix = draw_matrix(np.random.default_rng(0), label, num_outputs, num_groups)

    packed = pack_matrix(label, matrix)

    assert packed.shape == (packed_bytes(label, num_outputs, 32 * num_groups),)
    assert_same(unpack_matrix(label, packed, num_outputs, 32 * num_groups), matrix)


@pytest.mark.parametrize("label", FORMATS)
def test_rows_of_a_model_file_keep_their_values(label, monkeypatch):
    monkeypatch.setattr("kernels.cuda.quantized_layout.PACKED_AT_ONCE", 32 * 64)  # a panel each
    rows = draw_rows(label, 75, 2)
    decoded = np.empty((75, 64), np.float32)
    decode_rows(rows, label, decoded, path=Path("model"), name="w")

    found = unpack_matrix(label, pack_rows(label, rows, 64), 75, 64)

    assert_same(found, split_rows(label, rows))
    out = np.empty((64, 75))
    quantized_matmul(np.eye(64), found.quants, found.scales, found.minima, out)
    np.testing.assert_allclose(out.T, decoded, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("label", FORMATS)
def test_a_weight_lies_where_the_drawing_has_it(label):
    fmt = FORMATS[label]
    panel, tile, row, k = 1, 2, 21, 13  # i = 2, group 5; quad 1, e = 5
    quants = np.full((64, 96), -fmt.offset, np.int8)
    quants[32 * panel + row, 32 * tile + k] = 1 - fmt.offset
    scales = np.zeros((64, 3), np.float16)
    scales[32 * panel + row, tile] = 1.0
    minima = 2 * scales if fmt.has_minimum else None

    packed = pack_matrix(label, QuantizedMatrix(quants, scales, minima))

    found = packed.reshape(2, 3, fmt.tile_bytes)[panel, tile]
    expected = np.zeros(fmt.tile_bytes, np.uint8)
    i, group = divmod(row, 8)
    quad, e = divmod(k, 8)
    lane = 4 * group + quad
    if fmt.bits == 4:
        words = expected[:512].view("<u4").reshape(32, 4)
        words[lane, i] = 1 << (4 * (e // 2) + 16 * (e % 2))
    else:
        stored = expected[:1024].view(np.int8).reshape(2, 32, 2, 2, 4)  # i // 2, lane, i % 2, word
        stored[i // 2, lane, i % 2, e // 4, [0, 2, 1, 3][e % 4]] = 1
    halves = expected[fmt.scales_at :].view("<f2").reshape(8, -1, 4)
    halves[group, 0, i] = 1.0
    if fmt.has_minimum:
        halves[group, 1, i] = 2.0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("group", [64, 128, 256])
def test_a_scale_for_a_larger_group_is_repeated(group):
    rng = np.random.default_rng(1)
    quants = rng.integers(0, 16, (32, 256), np.int8)
    scales = rng.uniform(1, 2, (32, 256 // group)).astype(np.float16)
    minima = -8 * scales

    packed = pack_matrix("Q4_1", QuantizedMatrix(quants, scales, minima))
    found = unpack_matrix("Q4_1", packed, 32, 256)

    out, expected = np.empty((256, 32)), np.empty((256, 32))
    quantized_matmul(np.eye(256), found.quants, found.scales, found.minima, out)
    quantized_matmul(np.eye(256), quants, scales, minima, expected)
    np.testing.assert_array_equal(out, expected)


def matrix_of(num_inputs: int, num_scales: int, *, highest: int = 7, minima: bool = False):
    scales = np.ones((16, num_scales), np.float16)
    quants = np.full((16, num_inputs), highest, np.int16)
    return QuantizedMatrix(quants, scales, scales if minima else None)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda: packed_bytes("Q5_0", 16, 32), "weights must be one of Q8_0, Q4_0, Q4_1"),
        (lambda: packed_bytes("Q4_0", 16, 48), "num_inputs must be a multiple of 32, got 48"),
        (lambda: packed_bytes("Q4_0", 16, 0), "num_inputs must be a multiple of 32, got 0"),
        (lambda: pack_matrix("Q4_0", matrix_of(96, 2)), "group must be one of 32 .* got 48.0"),
        (lambda: pack_matrix("Q4_0", matrix_of(96, 4)), "group must be one of 32 .* got 24.0"),
        (lambda: pack_matrix("Q4_0", matrix_of(64, 1, minima=True)), "minima must be absent for"),
        (lambda: pack_matrix("Q4_1", matrix_of(64, 1)), "minima must be given for Q4_1"),
        (lambda: pack_matrix("Q4_0", matrix_of(64, 1, highest=8)), "quants must be between -8 "),
        (lambda: pack_matrix("Q8_0", matrix_of(64, 1, highest=128)), "between -128 and 127"),
        (lambda: pack_rows("Q8_0", np.zeros((1, 33), np.uint8), 32), "rows must be of 34 bytes"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_the_layout_is_refused_by_name(pack, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        pack()
