"""Norms of all query heads of a token together, and of all its key heads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from kernels.reference.rope import normed_together

Float32Array = npt.NDArray[np.float32]
EPSILON = 1e-5
SIZES = [(32, 32), (96, 32), (250, 50), (2048, 512)]


def drawn(queries: int, keys: int) -> tuple[Float32Array, tuple[Float32Array, Float32Array]]:
    """Rows of magnitudes from 1e-3 to 30, and one of zeros; weights."""
    random = np.random.default_rng([queries, keys])
    magnitudes = np.array([1, 1e-3, 0, 30, 1], np.float32)[:, None]
    rows = random.standard_normal((5, queries + 2 * keys), np.float32) * magnitudes
    of_queries, of_keys = (random.uniform(0.5, 1.5, n).astype("f4") for n in (queries, keys))
    return rows, (of_queries, of_keys)


def run(
    rows: Float32Array, norms: tuple[Float32Array, Float32Array], chunks: Iterable[int] = (0,)
) -> Float32Array:
    """Return the rows as the operation leaves them."""
    from kernels.cpu.catalogue import joint_norms
    from kernels.cpu.operands import JointNorms
    from kernels.cpu.operation import RECORD_WORDS
    from tests.kernels.cpu.operation_calls import run as run_operation
    from tests.kernels.cpu.operation_calls import step_header

    out = rows.copy()
    record = np.zeros(RECORD_WORDS, np.int64)
    record[JointNorms.QKV] = out.ctypes.data
    record[JointNorms.QUERY_SIZE], record[JointNorms.KEY_SIZE] = map(len, norms)
    record[JointNorms.QUERY_NORM], record[JointNorms.KEY_NORM] = (n.ctypes.data for n in norms)
    record[JointNorms.EPSILON] = np.float32(EPSILON).view(np.uint32)
    run_operation(joint_norms, record, step_header(len(rows))[0], chunks)
    return out


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_queries_and_keys_are_those_of_the_reference_and_values_as_they_were(
    queries: int, keys: int
) -> None:
    rows, norms = drawn(queries, keys)
    expected = rows.copy()
    normed_together(expected, norms, EPSILON)
    found = run(rows, norms)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(found[:, queries + keys :], rows[:, queries + keys :])


def test_a_tokens_bits_are_its_own() -> None:
    rows, norms = drawn(96, 32)
    whole = run(rows, norms)
    np.testing.assert_array_equal(run(rows, norms, range(3)), whole)
    for token in range(len(rows)):
        np.testing.assert_array_equal(run(rows[token : token + 1], norms)[0], whole[token])


def test_what_is_not_a_number_stays_in_its_token_and_among_queries_or_keys() -> None:
    rows, norms = drawn(96, 32)
    rows[1, 5] = np.nan
    rows[3, 100] = np.nan
    found = np.isnan(run(rows, norms))
    assert found[1, :96].all()
    assert found[3, 96:128].all()
    assert found.sum() == 96 + 32
