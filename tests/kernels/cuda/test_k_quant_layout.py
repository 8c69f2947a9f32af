"""Weights of five and six bits and shared scales, packed for the device: every bit, and where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.gpu.cases.quantized_matmul import draw_matrix
from compute_plane.model.dequantize import decode_rows
from compute_plane.model.tensor import TensorFormat
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.k_quant_layout import BLOCK_BYTES
from kernels.cuda.quantized_formats import FORMATS
from kernels.cuda.quantized_layout import pack_matrix, pack_rows, unpack_matrix
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.reference.quantized_matmul import dequantized

FLOATS_AT = {"Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
"""Where a block's float16 lie."""
NUM_INPUTS = 512


def random_rows(label: str, num_rows: int) -> np.ndarray:
    """Return rows of a file in which every bit but those of float16 is random."""
    fmt, rng = TensorFormat[label], np.random.default_rng(num_rows)
    rows = rng.integers(0, 256, (num_rows, fmt.row_bytes(NUM_INPUTS)), np.uint8)
    blocks = rows.reshape(-1, fmt.block_bytes)
    for at in FLOATS_AT[label]:
        floats = rng.standard_normal((len(blocks), 1)).astype("<f2")
        floats[::7] = np.float16(6e-8)  # the smallest there is
        blocks[:, at : at + 2] = floats.view(np.uint8)
    return rows


@pytest.mark.parametrize("label", BLOCK_BYTES)
@pytest.mark.parametrize("num_rows", [1, 32, 75])
def test_every_weight_of_a_file_is_the_same_float32(
    label: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = 32 * NUM_INPUTS
    monkeypatch.setattr("kernels.cuda.quantized_layout.PACKED_AT_ONCE", panel)  # a panel each
    rows = random_rows(label, num_rows)
    expected = np.empty((num_rows, NUM_INPUTS), np.float32)
    decode_rows(rows, label, expected, path=Path("model"), name="w")

    packed = pack_rows(label, rows, NUM_INPUTS)

    found = np.empty_like(expected)
    dequantized(*unpack_matrix(label, packed, num_rows, NUM_INPUTS).operands, found)
    np.testing.assert_array_equal(found, expected)
    assert len(packed) == -(-num_rows // 32) * FORMATS[label].panel_bytes(NUM_INPUTS)


def matrix_with(label: str, row: int, k: int, q: int, numbers: tuple[float, ...]) -> Any:
    """Return a matrix of two panels and two units with one weight, and the numbers of its group."""
    fmt, num_rows = FORMATS[label], 64
    quants = np.full((num_rows, 2 * max(fmt.unit, 64)), -fmt.offset, np.int8)
    quants[row, k] = q - fmt.offset
    num_inputs = quants.shape[1]

    def sparse(kind: Any, group: int, value: float) -> np.ndarray:
        values = np.zeros((num_rows, num_inputs // group), kind)
        values[row, k // group] = value
        return values

    d, m, s, n = numbers
    return QuantizedMatrix(
        quants,
        sparse(np.float16, fmt.unit, d),
        sparse(np.float16, fmt.unit, m) if fmt.has_minimum else None,
        whole_scales=sparse(np.int8 if fmt.runs == 2 else np.uint8, 32 // fmt.runs, s)
        if fmt.shares
        else None,
        whole_minima=sparse(np.uint8, 32, n) if fmt.shares and fmt.has_minimum else None,
    )


# By bits, of a quad's eight weights e: the word of the row (0) or of the rest (1), the lowest bit
# in the half, the bits of q from and to.
PLACES = {
    4: [[(0, 4 * j, 0, 4)] for j in range(4)],
    5: [[(0, 0, 0, 5)], [(0, 5, 0, 5)], [(0, 10, 0, 5)], [(0, 15, 4, 5), (1, 0, 0, 4)]],
    6: [[(0, 0, 0, 6)], [(0, 6, 0, 6)], [(1, 0, 0, 6)], [(0, 12, 0, 4), (1, 6, 4, 6)]],
}


@pytest.mark.parametrize("label", BLOCK_BYTES)
@pytest.mark.parametrize(("row", "in_tile"), [(21, 13), (8, 0), (30, 31), (3, 18), (4, 6)])
def test_a_weight_and_its_numbers_lie_where_the_drawings_have_them(
    label: str, row: int, in_tile: int
) -> None:
    fmt, tile, q = FORMATS[label], 1, 0b101101 & 2 ** FORMATS[label].bits - 1
    s = -77 if fmt.runs == 2 else 45
    num_inputs = 2 * max(fmt.unit, 64)
    k = fmt.unit + 32 * tile + in_tile if fmt.shares else 32 * tile + in_tile
    tile = k // 32

    packed = pack_matrix(label, matrix_with(label, 32 + row, k, q, (1.5, -2.5, s, 51)))

    found = packed.reshape(2, -1)[1]
    expected = np.zeros_like(found)
    i, group = divmod(row, 8)
    quad, e = divmod(in_tile, 8)
    if fmt.runs == 2:
        run, in_run = divmod(in_tile, 16)
        quad, e = in_run // 4, 4 * run + in_run % 4
    tiles = expected[: fmt.scales_at(num_inputs)].reshape(-1, fmt.tile_bytes)
    words = tiles[:, :512].copy().view("<u4").reshape(-1, 32, 4)
    rest = tiles[:, 512:].copy().view("<u4").reshape(len(tiles), 32, -1)
    for which, at, first, end in PLACES[fmt.bits][e // 2]:
        bits = (q >> first & 2 ** (end - first) - 1) << at + 16 * (e % 2)
        if which == 0:
            words[tile, 4 * group + quad, i] |= bits
        elif fmt.bits == 5:
            rest[tile, 4 * group + quad, 0] |= bits << 4 * i
        else:
            rest[tile, 4 * group + quad, i // 2] |= bits << 8 * (i % 2)
    tiles[:, :512] = words.view(np.uint8).reshape(len(tiles), -1)
    tiles[:, 512:] = rest.view(np.uint8).reshape(len(tiles), -1)
    spans_at, num_spans = fmt.scales_at(num_inputs), num_inputs // 32
    spans = expected[spans_at : spans_at + num_spans * fmt.span_bytes].reshape(num_spans, -1)
    if fmt.shares:
        pairs = spans.reshape(num_spans, 8, 2, 4)
        if fmt.runs == 2:
            pairs[:] = 128  # of scales that are 0
            pairs[tile, group, in_tile // 16, i] = s + 128
        else:
            pairs[tile, group, :, i] = s, 51
        numbers = expected[spans_at + spans.size :][: 2 * fmt.shared_bytes]
    else:
        numbers = spans[tile]
    kinds = 2 if fmt.has_minimum else 1
    of_group = numbers.copy().view("<f2").reshape(-1, 8, kinds, 4)
    of_group[-1, group, :, i] = [1.5, -2.5][:kinds]
    numbers[:] = of_group.reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("label", BLOCK_BYTES)
def test_rows_behind_the_last_one_are_zeros(label: str) -> None:
    packed = pack_rows(label, random_rows(label, 3), NUM_INPUTS)

    found = np.empty((32, NUM_INPUTS), np.float32)
    dequantized(*unpack_matrix(label, packed, 32, NUM_INPUTS).operands, found)
    assert found[:3].any(axis=1).all()
    assert not found[3:].any()


@pytest.mark.parametrize("label", BLOCK_BYTES)
def test_floats_for_more_than_what_has_them_are_repeated(label: str) -> None:
    repeated = draw_matrix(np.random.default_rng(1), label, 40, 4)
    scales, minima = repeated.scales[:, ::2], repeated.minima
    repeated.scales[:, 1::2] = scales
    if minima is not None:
        minima[:, 1::2] = minima[:, ::2]
        minima = minima[:, ::2]
    matrix = replace(repeated, scales=scales, minima=minima)

    np.testing.assert_array_equal(pack_matrix(label, matrix), pack_matrix(label, repeated))


def changed(label: str, **fields: Any) -> QuantizedMatrix:
    matrix = draw_matrix(np.random.default_rng(0), label, 4, 1)
    names = ("quants", "scales", "minima", "zeros", "whole_scales", "whole_minima")
    return QuantizedMatrix(**({name: getattr(matrix, name) for name in names} | fields))


WHOLE = np.full((4, 8), 64, np.uint8)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (lambda: pack_rows("Q4_K", np.zeros((1, 143), np.uint8), 256), "rows must be of 144 bytes"),
        (lambda: pack_rows("Q6_K", np.zeros((1, 210), np.uint8), 128), "multiple of 256, got 128"),
        (lambda: pack_rows("Q5_0", np.zeros((1, 24), np.uint8), 32), "rows must be of 22 bytes"),
        (lambda: pack_matrix("Q4_K", changed("Q4_K", whole_scales=None)),
         r"whole_scales must be \(4, 8\) for Q4_K, got None"),
        (lambda: pack_matrix("Q4_K", changed("Q4_K", whole_scales=WHOLE)),
         r"whole_scales must be between 0 and 63, got \(64, 64\)"),
        (lambda: pack_matrix("Q5_K", changed("Q5_K", whole_minima=WHOLE)),
         "whole_minima must be between 0 and 63"),
        (lambda: pack_matrix("Q6_K", changed("Q6_K", whole_scales=WHOLE)),
         r"whole_scales must be \(4, 16\) for Q6_K, got \(4, 8\)"),
        (lambda: pack_matrix("Q8_0", changed("Q8_0", whole_scales=WHOLE)),
         "whole_scales must be absent for Q8_0"),
        (lambda: pack_matrix("Q6_K", changed("Q6_K", quants=np.full((4, 256), 32, np.int8))),
         r"quants must be between -32 and 31, got \(32, 32\)"),
        (lambda: pack_matrix("Q5_1", changed("Q5_1", minima=None)), "minima must be given for"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_the_layout_is_refused_by_name(pack: Any, message: str) -> None:
    with pytest.raises(UnsupportedVariantError, match=message):
        pack()
