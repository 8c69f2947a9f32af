"""Biases of products, added to the rows that these wrote."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.added_rows import add_bias
from kernels.cpu.operands import BiasRecord
from kernels.cpu.operation import RECORD_WORDS, StepWord
from tests.kernels.cpu.operation_calls import run, step_header


@pytest.mark.parametrize("n", [1, 15, 16, 33, 576])
@pytest.mark.parametrize(("word", "first"), [(StepWord.FIRST_TOKEN, 2), (StepWord.ZERO, 0)])
def test_a_bias_is_added_to_the_rows_of_a_piece_and_to_no_others(
    n: int, word: StepWord, first: int
) -> None:
    random = np.random.default_rng(n)
    rows, bias = random.standard_normal((9, n), np.float32), random.standard_normal(n, np.float32)
    expected = rows.copy()
    expected[first : first + 5] += bias
    record = np.zeros(RECORD_WORDS, np.int64)
    record[BiasRecord.OUT], record[BiasRecord.N] = rows.ctypes.data, n
    record[BiasRecord.BIAS], record[BiasRecord.OUT_FIRST_WORD] = bias.ctypes.data, word
    run(add_bias, record, step_header(5, first=2)[0], range(3))
    np.testing.assert_array_equal(rows, expected)
