"""Outputs of sublayers, normalised and added to the hidden rows of a piece."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.normed_sums import add_normed_rows
from kernels.cpu.operands import NormedSum
from kernels.cpu.operation import RECORD_WORDS, StepWord
from kernels.reference.rms_norm import rms_norm
from tests.kernels.cpu.operation_calls import Float32Array, Int64Array, run, step_header

EPSILON = 1e-3


def drawn(*shape: int) -> Float32Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) * 2


def record_of(x: Float32Array, weight: Float32Array, hidden: Float32Array) -> Int64Array:
    record = np.zeros(RECORD_WORDS, np.int64)
    record[NormedSum.SOURCE], record[NormedSum.K] = x.ctypes.data, x.shape[1]
    record[NormedSum.WEIGHT], record[NormedSum.HIDDEN] = weight.ctypes.data, hidden.ctypes.data
    record[NormedSum.EPSILON] = np.float32(EPSILON).view(np.uint32)
    record[NormedSum.SCALE] = np.float32(1).view(np.uint32)
    record[NormedSum.PARTS], record[NormedSum.SOURCE_FIRST_WORD] = 1, StepWord.ZERO
    return record


@pytest.mark.parametrize("k", [1, 5, 31, 32, 33, 64, 100, 576])
def test_a_pieces_rows_are_normalised_and_added_to_its_hidden_rows(k: int) -> None:
    x, weight, hidden = drawn(5, k), drawn(k), drawn(9, k)
    normed = np.empty_like(x)
    rms_norm(x, weight, EPSILON, normed)
    expected = hidden.copy()
    expected[2:7] += normed
    header, _ = step_header(5, first=2)
    run(add_normed_rows, record_of(x, weight, hidden), header, range(3))
    np.testing.assert_allclose(hidden[2:7], expected[2:7], rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(hidden[[0, 1, 7, 8]], expected[[0, 1, 7, 8]])


def test_parts_of_a_token_are_normed_each_for_itself_and_sums_are_scaled() -> None:
    x, weight, hidden = drawn(5, 4 * 32), drawn(32), drawn(9, 4 * 32)
    normed = np.empty((20, 32), np.float32)
    rms_norm(x.reshape(20, 32), weight, EPSILON, normed)
    expected = hidden.copy()
    expected[2:7] = (expected[2:7] + normed.reshape(5, 128)) * np.float32(0.7)
    record = record_of(x, weight, hidden)
    record[NormedSum.K], record[NormedSum.PARTS] = 32, 4
    record[NormedSum.SCALE] = np.float32(0.7).view(np.uint32)
    run(add_normed_rows, record, step_header(5, first=2)[0], range(3))
    np.testing.assert_allclose(hidden, expected, rtol=2e-6, atol=1e-6)


def test_norms_may_be_added_to_another_row_than_they_replace() -> None:
    """Their source may hold all tokens of a step, as hidden rows do."""
    x, weight, base = drawn(9, 40), drawn(40), drawn(1, 40)
    hidden = np.full((9, 40), np.nan, np.float32)
    normed = np.empty_like(x)
    rms_norm(x, weight, EPSILON, normed)
    record = record_of(x, weight, hidden)
    record[NormedSum.BASE] = base.ctypes.data
    record[NormedSum.SOURCE_FIRST_WORD] = StepWord.FIRST_TOKEN
    run(add_normed_rows, record, step_header(5, first=2)[0], range(2))
    np.testing.assert_allclose(hidden[2:7], normed[2:7] + base, rtol=2e-6, atol=1e-6)
    assert np.isnan(hidden[[0, 1, 7, 8]]).all()


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    x, weight, hidden = drawn(6, 100), drawn(100), drawn(6, 100)
    alone = hidden[4:5].copy()
    run(add_normed_rows, record_of(x[4:5], weight, alone), step_header(1)[0])
    run(add_normed_rows, record_of(x, weight, hidden), step_header(6)[0], [2, 0, 1])
    np.testing.assert_array_equal(hidden[4], alone[0])


def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    x, weight, hidden = drawn(3, 40), drawn(40), drawn(3, 40)
    x[1, 7] = np.nan
    run(add_normed_rows, record_of(x, weight, hidden), step_header(3)[0])
    assert np.isnan(hidden[1]).all()
    assert np.isfinite(hidden[[0, 2]]).all()
