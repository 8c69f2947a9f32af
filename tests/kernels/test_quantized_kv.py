"""Keys and values in eight bits: the codes, the scales, and how they lie in a CUDA pool."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cuda.quantized_kv import QUANTIZED_DTYPES, decode_heads, encode_heads, head_bytes
from kernels.reference.quantized_kv import (
    LARGEST,
    dequantize_rows,
    from_float8,
    quantize_rows,
    to_float8,
)

POSITIVE = np.arange(127, dtype=np.uint8)  # codes of float8, in the order of their values


def test_float8_runs_from_two_to_the_minus_nine_to_448():
    numbers = from_float8(POSITIVE)

    assert numbers[0] == 0
    assert numbers[1] == 2.0**-9
    assert numbers[8] == 2.0**-6
    assert numbers[0b0_0111_000] == 1
    assert numbers[126] == LARGEST["float8"]
    assert (np.diff(numbers) > 0).all()
    assert np.isnan(from_float8(np.array([0x7F, 0xFF], np.uint8))).all()
    np.testing.assert_array_equal(from_float8(POSITIVE | np.uint8(0x80)), -numbers)


def test_float8_is_the_nearest_and_of_two_the_even_one():
    numbers = from_float8(POSITIVE)
    middles = (numbers[:-1] + numbers[1:]) / 2
    even = POSITIVE[:-1] + (POSITIVE[:-1] & 1)

    np.testing.assert_array_equal(to_float8(numbers), POSITIVE)
    np.testing.assert_array_equal(to_float8(middles), even)
    np.testing.assert_array_equal(to_float8(np.nextafter(middles, np.float32(0))), POSITIVE[:-1])
    np.testing.assert_array_equal(to_float8(np.nextafter(middles, np.float32(999))), POSITIVE[1:])
    np.testing.assert_array_equal(to_float8(-middles), even | 0x80)


@pytest.mark.parametrize(("dtype", "step"), [("int8", 1 / 254), ("float8", 1 / 28)])
def test_a_row_is_off_by_half_a_step_of_its_largest_number(dtype, step):
    rows = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    rows *= np.exp2(np.arange(-25, 25, dtype=np.float32))[:, None]

    codes, scales = quantize_rows(dtype, rows)

    largest = np.abs(rows).max(axis=1)
    np.testing.assert_allclose(scales, largest / LARGEST[dtype], rtol=1e-6)
    off = np.abs(dequantize_rows(dtype, codes, scales) - rows).max(axis=1)
    assert (off <= 1.0001 * step * largest).all()
    assert (off / largest).max() >= 0.8 * step


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_is_nan_and_its_neighbours_are_not(dtype, poison):
    rows = np.ones((3, 64), np.float32)
    rows[1, 7] = poison

    found = dequantize_rows(dtype, *quantize_rows(dtype, rows))

    assert np.isnan(found[1]).all()
    np.testing.assert_allclose(found[[0, 2]], 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_rows_of_zeros_and_of_the_smallest_numbers_there_are_stay_harmless(dtype):
    rows = np.zeros((2, 64), np.float32)
    rows[1] = 1e-45

    np.testing.assert_allclose(dequantize_rows(dtype, *quantize_rows(dtype, rows)), 0, atol=1e-44)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_a_head_of_a_block_holds_its_rows_and_behind_them_the_scales(dtype):
    values = np.random.default_rng(1).standard_normal((2, 3, 16, 64)).astype(np.float32)
    codes, scales = quantize_rows(dtype, values)

    heads = encode_heads(dtype, values)

    assert heads.shape == (2, 3, head_bytes(64, 16))
    np.testing.assert_array_equal(heads[1, 2, 5 * 64 : 6 * 64], codes[1, 2, 5])
    np.testing.assert_array_equal(heads[1, 2, 16 * 64 :].view(np.float32), scales[1, 2])
    np.testing.assert_array_equal(
        decode_heads(dtype, heads, 64), dequantize_rows(dtype, codes, scales)
    )
