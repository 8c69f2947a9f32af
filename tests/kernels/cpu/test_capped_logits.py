"""Logits that stay below a cap."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.capped_logits import cap_logits
from kernels.cpu.operands import LogitsCap
from kernels.cpu.operation import RECORD_WORDS, StepWord
from kernels.reference import capped_logits
from tests.kernels.cpu.operation_calls import Float32Array, Int64Array, run, step_header


def record_of(logits: Float32Array, cap: float) -> Int64Array:
    record = np.zeros(RECORD_WORDS, np.int64)
    record[LogitsCap.LOGITS], record[LogitsCap.VOCAB] = logits.ctypes.data, logits.shape[1]
    record[LogitsCap.CAP] = np.float32(cap).view(np.uint32)
    return record


def capped(logits: Float32Array, cap: float, chunks: int = 16) -> Float32Array:
    """Return logits, capped; there is a row behind them that stays."""
    found = np.concatenate([logits, np.full((1, logits.shape[1]), 7, np.float32)])
    header, _ = step_header(1)
    header[StepWord.NUM_OUT_ROWS] = len(logits)
    run(cap_logits, record_of(found, cap), header, range(chunks))
    assert (found[-1] == 7).all()
    return found[:-1]


@pytest.mark.parametrize("vocab", [1, 31, 32, 100, 515, 1024])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_capped_logits_are_those_of_the_reference(vocab: int, cap: float) -> None:
    logits = np.random.default_rng(vocab).standard_normal((3, vocab)).astype(np.float32) * 40
    expected = logits.copy()
    capped_logits.cap_logits(expected, cap)
    np.testing.assert_allclose(capped(logits, cap), expected, rtol=0, atol=2e-7 * cap)


def test_caps_are_reached_from_either_side_and_order_is_kept() -> None:
    logits = np.float32([[-1e30, -300, -1, 0, 1, 300, 1e30]])
    found = capped(logits, 30.0)[0]
    assert found[0] == found[1] == -30
    assert found[5] == found[6] == 30
    assert found[3] == 0
    assert (np.diff(found[1:6]) > 0).all()


def test_what_is_not_finite_is_noticed_behind_it() -> None:
    found = capped(np.float32([[1, np.nan, np.inf, -np.inf, 2]]), 30.0)[0]
    assert np.isnan(found[1:4]).all()
    assert np.isfinite(found[[0, 4]]).all()


def test_a_row_has_the_same_bits_alone_and_however_it_is_cut() -> None:
    logits = np.random.default_rng(5).standard_normal((4, 1000)).astype(np.float32) * 50
    all_rows = capped(logits, 30.0, chunks=16)
    np.testing.assert_array_equal(capped(logits[2:3], 30.0, chunks=3)[0], all_rows[2])
