"""Products that gate their own sums: the bits of the product and of the gate behind it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kernels.cpu.catalogue import GATED_PRODUCTS
from kernels.cpu.operands import RowFormat, RowInput
from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
from kernels.cpu.row_inputs import gated_rows
from tests.amx.marks import needs_tiles
from tests.kernels.cpu.float_driver import FIRST_ROW, packed, product, run_product
from tests.kernels.cpu.float_driver import to_bf16 as rounded
from tests.kernels.cpu.test_unpacked_products import FORMATS, example, operation_of

pytestmark = needs_tiles

MARK = 0x4321
SHAPES = [
    (1, 576, 96),
    (17, 96, 32),
    (33, 576, 1088),
    (70, 672, 160),
    (42, 2048, 608),
    (40, 6144, 320),
]
"""(M, K, N): one and several groups of pairs and parts, blocks that are not full."""


def matrices(label: str, m: int, k: int, n: int):
    """Return rows, packed weights, and the name of the product that does not gate."""
    if label != "BF16":
        rows, weights, _ = example(label, m, k, n)
        return rows, weights, operation_of(label)
    random = np.random.default_rng([m, k, n])
    weights = rounded(0.1 * random.standard_normal((n, k), dtype=np.float32))
    rows = rounded(random.standard_normal((m, k), dtype=np.float32))
    return rows, packed(weights, "BF16"), "product_bf16_rows"


def gated_afterwards(sums: np.ndarray) -> np.ndarray:
    """Return silu(gate) · up of rows of sums, as bfloat16, as the next operation would."""
    m, n = sums.shape
    sums, out = np.ascontiguousarray(sums), np.zeros((m, n // 2), np.uint16)
    record, header = np.zeros(RECORD_WORDS, np.int64), np.zeros(HEADER_WORDS, np.int64)
    header[StepWord.NUM_TOKENS] = m
    record[RowInput.SOURCE], record[RowInput.SOURCE_STRIDE] = sums.ctypes.data, n
    record[RowInput.SOURCE_FIRST_WORD] = StepWord.ZERO
    record[RowInput.ROWS_WORD] = StepWord.NUM_TOKENS
    record[RowInput.K], record[RowInput.FORMAT] = n // 2, RowFormat.BF16
    record[RowInput.OUT] = out.ctypes.data
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(gated_rows.address)
    kernel(record.ctypes.data, header.ctypes.data, 0, 1, 0)
    return out


def gated(label: str, rows: np.ndarray, weights: np.ndarray, n: int, chunks: int = 1):
    out = np.full((FIRST_ROW + len(rows) + 1, n // 2), MARK, np.uint16)
    run_product(GATED_PRODUCTS[label].name.rpartition(".")[2], rows, weights, n, out, chunks=chunks)
    assert (out[:FIRST_ROW] == MARK).all()
    assert (out[-1] == MARK).all()
    return out[FIRST_ROW:-1]


@pytest.mark.parametrize("label", ["BF16", *FORMATS])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_gating_in_the_product_has_the_bits_of_gating_afterwards(label, m, k, n):
    rows, weights, plain = matrices(label, m, k, n)
    expected = gated_afterwards(product(plain, rows, weights, n))
    np.testing.assert_array_equal(gated(label, rows, weights, n, chunks=3), expected)


def test_rows_that_end_within_a_tile_are_gated_too():
    rows, weights, plain = matrices("BF16", 37, 200, 64)
    expected = gated_afterwards(product(plain, rows, weights, 64))
    np.testing.assert_array_equal(gated("BF16", rows, weights, 64), expected)
    few = rows[:5].copy()  # which go through two pairs of panels at once
    np.testing.assert_array_equal(gated("BF16", few, weights, 64), expected[:5])


@pytest.mark.parametrize("label", ["BF16", *FORMATS])
def test_a_gated_row_has_the_same_bits_in_any_company_and_however_the_work_is_cut(label):
    rows, weights, _ = matrices(label, 105, 672, 160)
    together = gated(label, rows, weights, 160)
    for chunks in (2, 5, 40):
        np.testing.assert_array_equal(gated(label, rows, weights, 160, chunks), together)
    for first, end in [(0, 1), (3, 7), (9, 17), (20, 37), (40, 105)]:
        part = gated(label, np.ascontiguousarray(rows[first:end]), weights, 160)
        np.testing.assert_array_equal(part, together[first:end])
