"""Rows of tokens that go on alone."""

from __future__ import annotations

import numpy as np

from kernels.cpu.operands import TakenRows
from kernels.cpu.operation import RECORD_WORDS, StepWord
from kernels.cpu.taken_rows import take_rows
from tests.kernels.cpu.operation_calls import run, step_header


def test_rows_are_copied_behind_all_others_and_nothing_else_is_written() -> None:
    rows = np.random.default_rng(1).standard_normal((12, 33)).astype(np.float32)
    before, taken = rows.copy(), np.array([1, 4, 6], np.int64)
    header, _ = step_header(3, first=8)
    header[StepWord.TAKEN_TOKENS] = taken.ctypes.data
    record = np.zeros(RECORD_WORDS, np.int64)
    record[TakenRows.ROWS], record[TakenRows.ROW_BYTES] = rows.ctypes.data, 4 * 33
    run(take_rows, record, header, range(2))
    np.testing.assert_array_equal(rows[8:11], before[taken])
    np.testing.assert_array_equal(np.delete(rows, [8, 9, 10], 0), np.delete(before, [8, 9, 10], 0))
