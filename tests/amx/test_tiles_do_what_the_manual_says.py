"""Instructions on tiles, in hardware or in software, against the manual written out in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cpu.amx_tiles import COLUMNS_AT, CONFIGURATION_BYTES, PALETTE, ROWS_AT
from kernels.cpu.operation import Operation
from tests.amx.marks import needs_tiles
from tests.amx.tile_program import (
    COLUMNS,
    ROWS,
    TOTAL,
    bf16_product,
    cleared,
    int8_product,
)
from tests.kernels.cpu.float_driver import to_bf16, widen

Array = npt.NDArray[Any]

pytestmark = needs_tiles

SHAPES = [(16, 16, 16), (1, 16, 16), (16, 8, 16), (5, 3, 7), (1, 1, 1), (13, 16, 2)]
"""(M, K, N) in elements of 32 bits."""
SMALLEST = float(np.finfo(np.float32).tiny)


def configuration(shapes: dict[int, tuple[int, int]]) -> Array:
    """Return what LDTILECFG reads. `shapes`: register → rows, bytes of a row."""
    made = np.zeros(CONFIGURATION_BYTES, np.uint8)
    made[0] = PALETTE
    for number, (rows, row_bytes) in shapes.items():
        made[ROWS_AT + number] = rows
        made[COLUMNS_AT + 2 * number] = row_bytes
    return made


def of_product(m: int, k: int, n: int) -> Array:
    return configuration({TOTAL: (m, 4 * n), ROWS: (m, 4 * k), COLUMNS: (k, 4 * n)})


def in_room(values: Array, fill: int) -> Array:
    """Return the values as the corner of a larger matrix, full of garbage behind them."""
    room = np.full((values.shape[0] + 2, values.nbytes // len(values) + 12), fill, np.uint8)
    room[: len(values), :-12] = values.view(np.uint8)
    return room


def run(operation: Operation, made: Array, rows: Array, columns: Array, total: Array) -> Array:
    """Return `total` after a product; nothing behind its rows and columns may be written."""
    x, y, z = in_room(rows, 0xA5), in_room(columns, 0xA5), in_room(total, 0x5A)
    behind = z.copy()
    operands = [number for matrix in (x, y, z) for number in (matrix.ctypes.data, matrix.shape[1])]
    operation.to_function(7)(made.ctypes.data, *operands)
    found = np.ascontiguousarray(z[:-2, :-12]).view(total.dtype)
    behind[:-2, :-12] = z[:-2, :-12]
    np.testing.assert_array_equal(z, behind)
    return found


def flushed(values: Array) -> Array:
    """Return float32 with zeros, of the same sign, for subnormal numbers."""
    return np.where(np.abs(values) < SMALLEST, np.copysign(np.float32(0), values), values)


def product_of_pairs(rows: Array, columns: Array, total: Array) -> Array:
    """Return what TDPBF16PS makes of a total.

    rows: bfloat16 [M, 2·K]; columns: bfloat16 [K, 2·N], the pairs of K beside each other. Exact
    where a product and the sum it is added to share the 53 bits of float64.
    """
    m, n = total.shape
    x = flushed(widen(rows)).reshape(m, -1, 2)
    y = flushed(widen(columns)).reshape(-1, n, 2)
    chains = np.zeros((2, m, n), np.float32)
    for k in range(len(y)):
        for half in (0, 1):
            product = x[:, k, half, None].astype(np.float64) * y[None, k, :, half]
            chains[half] = flushed((product + chains[half]).astype(np.float32))
    return flushed(flushed(total) + flushed(chains[0] + chains[1]))


def pairs(random: np.random.Generator, m: int, k: int, n: int) -> tuple[Array, Array, Array]:
    rows = to_bf16(random.standard_normal((m, 2 * k), dtype=np.float32))
    columns = to_bf16(random.standard_normal((k, 2 * n), dtype=np.float32))
    return rows, columns, random.standard_normal((m, n), dtype=np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_summed_in_two_chains_and_then_added(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(shape)
    for _ in range(20):
        rows, columns, total = pairs(random, *shape)
        found = run(bf16_product, of_product(*shape), rows, columns, total)
        np.testing.assert_array_equal(found, product_of_pairs(rows, columns, total))


def test_subnormal_numbers_are_zero_and_none_come_out() -> None:
    random = np.random.default_rng(0)
    rows, columns, total = pairs(random, 16, 16, 16)
    for factor in (1.0, 2.0**-40, 2.0**-62):
        small = to_bf16(flushed(widen(rows) * np.float32(factor)))
        tiny = to_bf16(widen(columns) * np.float32(2.0**-64))
        least = total * np.float32(2.0**-126)
        found = run(bf16_product, of_product(16, 16, 16), small, tiny, least)
        assert not ((np.abs(found) < SMALLEST) & (found != 0)).any()
        np.testing.assert_array_equal(found, product_of_pairs(small, tiny, least))
    subnormal = np.full_like(rows, 0x0040)
    huge = to_bf16(np.full((16, 32), 2.0**100, np.float32))
    found = run(bf16_product, of_product(16, 16, 16), subnormal, huge, total)
    np.testing.assert_array_equal(found, total)


@pytest.mark.parametrize("bad", [0x7FC0, 0x7F80, 0xFF80])
def test_what_is_no_number_reaches_its_row_only(bad: int) -> None:
    rows, columns, total = pairs(np.random.default_rng(1), 16, 16, 16)
    healthy = run(bf16_product, of_product(16, 16, 16), rows, columns, total)
    rows[4, 9] = bad
    found = run(bf16_product, of_product(16, 16, 16), rows, columns, total)
    assert not np.isfinite(found[4]).any()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(healthy, 4, 0))


@pytest.mark.parametrize("shape", SHAPES)
def test_signed_bytes_are_summed_modulo_two_to_the_32nd(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    random = np.random.default_rng(shape)
    for _ in range(5):
        rows = random.integers(-128, 128, (m, 4 * k), np.int8)
        columns = random.integers(-128, 128, (k, 4 * n), np.int8)
        total = random.integers(-(2**31), 2**31, (m, n), np.int32)
        wide = columns.reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n).astype(np.int64)
        expected = (total + rows.astype(np.int64) @ wide).astype(np.int32)
        found = run(int8_product, of_product(*shape), rows, columns, total)
        np.testing.assert_array_equal(found, expected)


def test_a_cleared_register_is_zero_in_its_rows_and_columns() -> None:
    total = in_room(np.full((5, 24), 7, np.uint8), 7)
    made = configuration({TOTAL: (5, 24)})
    cleared.to_function(3)(made.ctypes.data, total.ctypes.data, total.shape[1])
    assert not total[:5, :24].any()
    assert (total[5:] == 7).all()
    assert (total[:, 24:] == 7).all()
