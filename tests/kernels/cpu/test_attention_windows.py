"""Attention in layers with a window: what a token sees, what is read, and the same bits always."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels.cpu.kv_layout import VALUE_BYTES
from kernels.reference.paged_attention import paged_attention
from tests.kernels.cpu.attention_driver import UNUSED_BLOCK, Case, make_case
from tests.kernels.cpu.test_attention_operation import tolerance

DTYPES = list(VALUE_BYTES)
WINDOW, LENGTH = 1050, 2300
"""Beyond a segment, so that a window has two or three of them."""


@pytest.fixture(scope="module", params=DTYPES)
def long_case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param, 9, 3, 64, 16, [LENGTH, 70], WINDOW)


def test_the_reference_sees_the_last_positions_and_no_block_before_them() -> None:
    random = np.random.default_rng(0)
    pool = random.standard_normal((5, 1, 2, 1, 4, 8)).astype(np.float32)
    query = random.standard_normal((1, 1, 8)).astype(np.float32)
    tables, rows = np.array([[3, 1, 4, 0]], np.int32), np.zeros(1, np.int32)
    out, expected = np.empty_like(query), np.empty_like(query)
    # Position 13 with a window of 6 sees 8 to 13, as position 5 sees all of blocks 4 and 0.
    place = np.array([5], np.int32)
    paged_attention(query, pool, 0, tables[:, 2:], rows, place, 0.3, 0, 1, expected)
    pool[[1, 2, 3]] = np.nan
    paged_attention(query, pool, 0, tables, rows, place + 8, 0.3, 0, 1, out, window=6)
    np.testing.assert_array_equal(out, expected)
    paged_attention(query, pool, 0, tables, rows, place + 8, 0.3, 0, 1, out, window=7)
    assert np.isnan(out).all()


@pytest.mark.spread(16)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 16, 17, 63, 64, 100, 4096])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 32, 1), (8, 2, 80, 24), (6, 2, 40, 8)],
)
def test_windows_are_those_of_the_reference_on_what_the_pool_holds(
    dtype: str, window: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    case = make_case(dtype, num_heads, num_kv_heads, head_dim, block_size, [1, 65, 210], window)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))
    decoded = case.attend([(2, position, position + 1) for position in range(0, 210, 7)])
    np.testing.assert_array_equal(decoded, result[66::7])


@pytest.mark.spread(1)
def test_a_long_window_is_that_of_the_reference(long_case: Case) -> None:
    result = long_case.attend(long_case.all_spans())
    bound = tolerance(long_case.setting.layout.dtype)
    np.testing.assert_allclose(result, long_case.out, rtol=0, atol=bound)


@pytest.mark.spread(1)
def test_tokens_one_by_one_have_the_bits_of_a_whole_prompt(long_case: Case) -> None:
    whole = long_case.attend([(0, 0, LENGTH)])
    edges = [0, 1023, 1024, 1049, 1050, 1051, 1064, 1066, 2047, 2048, 2073, 2074, 2075, 2299]
    for position in [*edges, *range(1100, 1220, 3)]:
        alone = long_case.attend([(0, position, position + 1)])
        np.testing.assert_array_equal(alone[0], whole[position])


@pytest.mark.spread(1)
def test_ragged_chunks_beside_other_rows_have_the_bits_of_a_whole_prompt(long_case: Case) -> None:
    whole, other = long_case.attend([(0, 0, LENGTH)]), long_case.attend([(1, 0, 70)])
    edges = [0, 1, 27, 192, 700, 1049, 1052, 1113, 1114, 2072, 2080, LENGTH]
    for first, end in pairwise(edges):
        both = long_case.attend([(1, 3, 70), (0, first, end)], chunks=5, workers=2)
        np.testing.assert_array_equal(both[67:], whole[first:end])
        np.testing.assert_array_equal(both[:67], other[3:])


@pytest.mark.spread(2)
def test_a_context_shared_among_threads_has_the_same_bits(long_case: Case) -> None:
    spans = [(0, end - 1, end) for end in (LENGTH, 70, 2048, 2049, 1074, 2074, 2075)]
    expected = long_case.attend(spans)
    np.testing.assert_array_equal(long_case.attend(spans, threads=16, workers=2), expected)


@pytest.mark.parametrize("window", [1, 5, 64, 130])
def test_blocks_of_one_token_which_have_short_segments_have_the_same_bits(window: int) -> None:
    """A segment has 64 tokens there, and an item 48: rows of one see different segments."""
    case = make_case("float32", 1, 1, 32, 1, [300], window)
    whole = case.attend([(0, 0, 300)])
    np.testing.assert_allclose(whole, case.out, rtol=0, atol=tolerance("float32"))
    alone = case.attend([(0, position, position + 1) for position in range(300)])
    np.testing.assert_array_equal(alone, whole)
    shared = [case.attend([(0, end - 1, end)], threads=16)[0] for end in range(1, 301)]
    np.testing.assert_array_equal(shared, whole)


@pytest.mark.spread(1)
@pytest.mark.parametrize("threads", [1, 16])
def test_blocks_before_the_window_are_not_read(long_case: Case, threads: int) -> None:
    """Not of decode, nor of chunks before the window of their first token; nor are their tables."""
    dtype = long_case.setting.layout.dtype
    case = make_case(dtype, 9, 3, 64, 16, [LENGTH], WINDOW)
    spans = [(0, LENGTH - 1, LENGTH), (0, LENGTH - 40, LENGTH - 1)]
    expected = [case.attend([span], threads=threads) for span in spans]
    num_passed = (LENGTH - 40 - WINDOW + 1) // 16
    case.setting.data[case.tables[0, :num_passed]] = 0xFF  # NaN
    case.tables[0, :num_passed] = UNUSED_BLOCK
    for span, result in zip(spans, expected, strict=True):
        assert np.isfinite(result).all()
        np.testing.assert_array_equal(case.attend([span], threads=threads), result)


def test_a_window_as_long_as_the_context_has_the_bits_of_none() -> None:
    for dtype in DTYPES:
        results = [
            make_case(dtype, 4, 2, 32, 16, [200], window).attend([(0, 0, 200)])
            for window in (0, 200, 1 << 30)
        ]
        np.testing.assert_array_equal(results[1], results[0])
        np.testing.assert_array_equal(results[2], results[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 64, 1000])
@pytest.mark.parametrize("window", [1, 3, 40, 64, 70])
def test_every_shape_is_that_of_the_reference_and_its_decode_has_the_same_bits(
    dtype: str, head_dim: int, group: int, block_size: int, window: int
) -> None:
    lengths = [1, max(1, block_size - 1), block_size, block_size + 1, 63, 64, 65, 150]
    case = make_case(dtype, 2 * group, 2, head_dim, block_size, lengths, window)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))
    last = case.attend([(s, length - 1, length) for s, length in enumerate(lengths)])
    np.testing.assert_array_equal(last, result[case.starts + lengths - 1])
