"""Products of bfloat16 rows with quantised weights, unpacked to bfloat16 on the way."""

from __future__ import annotations

import numpy as np
import pytest

from compute_plane.model.quantize import convert_rows
from compute_plane.model.tensor import TensorFormat
from kernels.cpu.float_sizes import BLOCK_ROWS
from kernels.cpu.int8_packing import INT8_FORMATS, packed_int8_bytes
from kernels.cpu.int8_turning import pack_int8_rows
from tests.amx.marks import needs_tiles
from tests.kernels.cpu.float_driver import FIRST_ROW, MARK, aligned, packed, product, run_product
from tests.kernels.cpu.float_driver import to_bf16 as rounded
from tests.kernels.cpu.operation_calls import random_blocks, whole_blocks

pytestmark = needs_tiles

COVERED = ("Q5_0", "Q5_1", "Q5_K", "IQ4_NL")
"""Unpacked by the same instructions as Q6_K or Q4_F, with scales as others have."""
FORMATS = [
    pytest.param(label, marks=pytest.mark.slow if label in COVERED else ())
    for label in INT8_FORMATS
]
SHAPES = [
    (1, 576, 96),
    (2, 32, 1),
    (17, 96, 48),
    (33, 576, 49),
    (70, 672, 80),
    (42, 2048, 600),
    (40, 6144, 300),
    (530, 3328, 34),
]
"""(M, K, N): one and several groups of pairs, parts, spans; panels and blocks that are not full."""


def operation_of(label: str) -> str:
    return f"product_{label.lower()}_unpacked"


def example(label: str, m: int, k: int, n: int):
    """Return bfloat16 rows, the packed weights, and the same weights packed as bfloat16."""
    k = whole_blocks(label, k)
    random = np.random.default_rng([m, k, n])
    stored = random_blocks(label, n, k, random)
    out = aligned(packed_int8_bytes(label, n, k))
    pack_int8_rows(label, stored, k, out)
    halves = convert_rows(stored, TensorFormat[label], TensorFormat.BF16, path="p", name="w")
    rows = rounded(random.standard_normal((m, k), dtype=np.float32))
    return rows, out, packed(halves.view(np.uint16), "BF16")


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_the_product_is_that_of_the_weights_as_bfloat16_bit_for_bit(label, m, k, n):
    rows, weights, halves = example(label, m, k, n)
    expected = product("product_bf16_rows", rows, halves, n)
    np.testing.assert_array_equal(
        product(operation_of(label), rows, weights, n, chunks=3), expected
    )


@pytest.mark.parametrize("label", FORMATS)
def test_a_row_has_the_same_bits_in_any_company_and_however_the_work_is_cut(label):
    m, n = 2 * BLOCK_ROWS + 41, 83
    rows, weights, _ = example(label, m, 672, n)
    together = product(operation_of(label), rows, weights, n)
    for chunks in (2, 5, 40):
        cut = product(operation_of(label), rows, weights, n, chunks=chunks)
        np.testing.assert_array_equal(cut, together)
    for first, end in [(0, 1), (3, 7), (9, 17), (20, 37), (40, 105)]:
        part = product(operation_of(label), np.ascontiguousarray(rows[first:end]), weights, n)
        np.testing.assert_array_equal(part, together[first:end])


@pytest.mark.parametrize("label", FORMATS)
def test_only_the_columns_and_rows_of_the_product_are_written_or_added_to(label):
    m, k, n = 18, 64, 95
    rows, weights, _ = example(label, m, k, n)
    expected = product(operation_of(label), rows, weights, n)
    for accumulate in (False, True):
        out = np.full((FIRST_ROW + m + 1, n + 19), MARK, np.float32)
        run_product(operation_of(label), rows, weights, n, out, chunks=2, accumulate=accumulate)
        written = out[FIRST_ROW : FIRST_ROW + m, :n]
        np.testing.assert_array_equal(written, expected + (MARK if accumulate else 0))
        written[:] = MARK
        assert (out == MARK).all()
