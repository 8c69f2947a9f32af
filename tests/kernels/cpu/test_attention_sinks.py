"""Attention of heads with sinks: the reference's softmax, and the same bits always."""

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


@pytest.fixture(scope="module", params=DTYPES)
def long_case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param, 4, 2, 64, 16, [LENGTH, 70], sinks=SINKS)


def test_the_reference_is_a_softmax_with_one_score_more_whose_weight_is_dropped() -> None:
    random = np.random.default_rng(0)
    pool = random.standard_normal((1, 1, 2, 2, 4, 8)).astype(np.float32)
    query = random.standard_normal((1, 4, 8)).astype(np.float32)
    tables, rows, place = np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.full(1, 3, np.int32)
    out = np.empty_like(query)
    paged_attention(query, pool, 0, tables, rows, place, 0.3, 0, 2, out, sinks=SINKS)
    for head, sink in enumerate(SINKS.astype(np.float64)):
        keys, values = pool[0, 0, :, head // 2].astype(np.float64)
        scores = np.append(0.3 * keys @ query[0, head], sink)
        weights = np.exp(scores - scores.max())
        expected = (weights / weights.sum())[:-1] @ values
        np.testing.assert_allclose(out[0, head], expected, rtol=1e-5, atol=1e-30)


@pytest.mark.spread(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 16, 100])
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(2, 64, 16), (1, 40, 8)])
def test_sinks_are_those_of_the_reference_on_what_the_pool_holds(
    dtype: str, window: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make_case(dtype, 4, num_kv_heads, head_dim, block_size, [1, 65, 210], window, SINKS)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))
    heads = np.abs(result.reshape(len(result), 4, -1))
    assert heads[:, :3].max() > 0.1
    assert heads[:, 3].max() < 1e-20, "a sink far above the scores leaves nothing"


@pytest.mark.spread(2)
def test_a_context_shared_among_threads_has_the_bits_of_a_whole_prompt(long_case: Case) -> None:
    bound = tolerance(long_case.setting.layout.dtype)
    whole = long_case.attend([(0, 0, LENGTH)])
    np.testing.assert_allclose(whole, long_case.out[:LENGTH], rtol=0, atol=bound)
    spans = [(0, LENGTH - 1, LENGTH), (1, 69, 70), (0, 1024, 1025), (0, 1023, 1024)]
    shared = long_case.attend(spans, threads=16, workers=2)
    np.testing.assert_array_equal(shared[[0, 2, 3]], whole[[LENGTH - 1, 1024, 1023]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_in_a_window_do_not_depend_on_where_a_chunk_begins(dtype: str) -> None:
    case = make_case(dtype, 4, 2, 64, 16, [LENGTH], 130, SINKS)
    whole = case.attend([(0, 0, LENGTH)])
    for first in (1023, 1024, 1060, 1099):
        np.testing.assert_array_equal(case.attend([(0, first, LENGTH)]), whole[first:])


def test_scores_far_below_their_sink_leave_zeros_and_no_nan() -> None:
    for dtype in DTYPES:
        case = make_case(dtype, 4, 1, 32, 16, [200], sinks=SINKS)
        case.queries *= np.float32(300)
        assert np.isfinite(case.attend([(0, 0, 200)])).all()
