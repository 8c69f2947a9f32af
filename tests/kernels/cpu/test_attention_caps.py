"""Attention of scores with a cap: the reference's softmax, and the same bits always."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.kv_layout import VALUE_BYTES
from kernels.reference.paged_attention import paged_attention
from tests.kernels.cpu.attention_driver import SINKS, Case, make_case
from tests.kernels.cpu.test_attention_operation import tolerance

DTYPES = list(VALUE_BYTES)
LENGTH = 1100
"""Beyond a segment."""
CAP = 0.7
"""Most scores of drawn heads are above it, in size."""


@pytest.fixture(scope="module", params=DTYPES)
def long_case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param, 4, 2, 64, 16, [LENGTH, 70], cap=CAP)


def test_the_reference_caps_scores_that_are_scaled() -> None:
    random = np.random.default_rng(0)
    pool = random.standard_normal((1, 1, 2, 2, 4, 8)).astype(np.float32)
    query = random.standard_normal((1, 4, 8)).astype(np.float32)
    tables, rows, place = np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.full(1, 3, np.int32)
    out = np.empty_like(query)
    paged_attention(query, pool, 0, tables, rows, place, 0.3, 0, 2, out, cap=CAP)
    for head in range(4):
        keys, values = pool[0, 0, :, head // 2].astype(np.float64)
        weights = np.exp(CAP * np.tanh(0.3 * keys @ query[0, head] / CAP))
        np.testing.assert_allclose(out[0, head], weights / weights.sum() @ values, rtol=1e-5)


@pytest.mark.spread(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 100])
@pytest.mark.parametrize("cap", [CAP, 50.0])
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(2, 64, 16), (1, 40, 8)])
def test_caps_are_those_of_the_reference_on_what_the_pool_holds(
    dtype: str, window: int, cap: float, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    shape = 4, num_kv_heads, head_dim, block_size, [1, 65, 210], window
    case = make_case(dtype, *shape, cap=cap)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))
    if cap == CAP and window != 1:
        without = make_case(dtype, *shape).out
        assert np.abs(case.out - without).max() > 10 * tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_may_have_a_sink_besides_which_has_no_cap(dtype: str) -> None:
    case = make_case(dtype, 4, 2, 64, 16, [150], 0, SINKS, cap=CAP)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))


@pytest.mark.spread(1)
def test_a_context_shared_among_threads_has_the_bits_of_a_whole_prompt(long_case: Case) -> None:
    bound = tolerance(long_case.setting.layout.dtype)
    whole = long_case.attend([(0, 0, LENGTH)])
    np.testing.assert_allclose(whole, long_case.out[:LENGTH], rtol=0, atol=bound)
    spans = [(0, LENGTH - 1, LENGTH), (1, 69, 70), (0, 1024, 1025), (0, 1023, 1024)]
    shared = long_case.attend(spans, threads=16, workers=2)
    np.testing.assert_array_equal(shared[[0, 2, 3]], whole[[LENGTH - 1, 1024, 1023]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_beyond_the_cap_are_the_cap(dtype: str) -> None:
    case = make_case(dtype, 4, 1, 32, 16, [200], cap=CAP)
    case.queries *= np.float32(1e6)
    found = case.attend([(0, 0, 200)])
    assert np.isfinite(found).all()
    # Weights are e^±c: none is more than so many times another.
    assert np.abs(found[100:]).max() < 2


def test_a_score_that_is_no_number_leaves_none() -> None:
    case = make_case("float32", 4, 1, 32, 16, [20], cap=CAP)
    case.queries[:, :32] = np.nan
    found = case.attend([(0, 0, 20)])
    assert np.isnan(found[:, :32]).all()
    assert np.isfinite(found[:, 32:]).all()


@pytest.mark.parametrize("cap", [1e5, 1e6])
def test_a_cap_far_above_the_scores_changes_nothing(cap: float) -> None:
    shape = "float32", 4, 2, 64, 16, [1, 150]
    case, without = make_case(*shape, cap=cap), make_case(*shape)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, without.attend(without.all_spans()), rtol=0, atol=5e-6)
