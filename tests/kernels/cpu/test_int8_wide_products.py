"""Few rows go through more panels at once than others, and have the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.int8_packing import INT8_FORMATS, PANEL_COLUMNS
from kernels.cpu.int8_sizes import MOST_ROWS, SET, WIDTH, wide_tile_sizes
from tests.kernels.cpu.operation_calls import product
from tests.kernels.cpu.test_int8_products import FORMATS, UNTOUCHED, make, multiplied

SIZES = wide_tile_sizes(SET)
pytestmark = pytest.mark.skipif(not SIZES, reason="the set has no wide tiles")

MOST_FEW = max((sizes.rows for sizes in SIZES), default=0)
WIDEST = max((sizes.panels for sizes in SIZES), default=0)
SEVERAL = max(MOST_ROWS, MOST_FEW + 1)
"""Rows that take no wide tile."""


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize("k", [32, 288, 640])
def test_any_number_of_panels_gives_few_rows_the_bits_they_have_among_more(
    label: str, k: int
) -> None:
    for panels in range(1, 2 * WIDEST + 2):
        n = panels * PANEL_COLUMNS - panels % 3
        _, packed, x = make(label, SEVERAL, n, k)
        together = multiplied(label, packed, x, SEVERAL, n)
        for rows in range(1, MOST_FEW + 1):
            few = multiplied(label, packed, x, rows, n)
            assert (few.view(np.int32) == together[:rows].view(np.int32)).all()


@pytest.mark.parametrize("label", FORMATS)
def test_any_cut_into_chunks_gives_few_rows_the_same_bits(label: str) -> None:
    n = (2 * WIDEST + 3) * PANEL_COLUMNS + 5
    _, packed, x = make(label, SEVERAL, n, 96)
    together = multiplied(label, packed, x, SEVERAL, n)
    for rows in range(1, MOST_FEW + 1):
        for count in range(1, n // WIDTH + 2):
            out = np.full((rows, n), UNTOUCHED)
            product(label, packed, x, rows, n, out, chunks=range(count))
            assert (out.view(np.int32) == together[:rows].view(np.int32)).all()


@pytest.mark.parametrize("label", INT8_FORMATS)
def test_few_rows_are_written_or_added_where_they_belong_and_nowhere_else(label: str) -> None:
    n = (WIDEST + 1) * PANEL_COLUMNS - 3
    _, packed, x = make(label, SEVERAL, n, 64)
    for rows in range(1, MOST_FEW + 1):
        sums = multiplied(label, packed, x, rows, n)
        out = np.full((rows + 3, n + 2 * PANEL_COLUMNS), UNTOUCHED)
        product(label, packed, x, rows, n, out, first=2)
        assert (out[2 : rows + 2, :n] == sums).all()
        product(label, packed, x, rows, n, out, first=2, accumulate=True)
        assert (out[2 : rows + 2, :n] == sums + sums).all()
        out[2 : rows + 2, :n] = UNTOUCHED
        assert (out == UNTOUCHED).all()
