"""Outputs of sublayers, normalised and added to the hidden rows of a piece."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.normed_sums import add_normed_rows
from kernels.cpu.operands import NormedSum
from kernels.cpu.operation import RECORD_WORDS
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
