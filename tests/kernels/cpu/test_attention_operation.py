from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels.cpu.attention_items import (
    SHARED_ITEMS,
    ContextSharing,
    attention_items,
    most_shared_items,
    share_long_contexts,
    tokens_per_item,
)
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.kv_layout import VALUE_BYTES
from tests.kernels.cpu.attention_driver import Case, make_case

DTYPES = list(VALUE_BYTES)
EDGES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 128]


def tolerance(dtype: str) -> float:
    """Where queries and weights are rounded to bfloat16, 2^-9 of each; else float32's own."""
    chosen = selected_instruction_set()
    rounds = dtype != "float32" and (chosen.has_amx or chosen.has_bf16_dot)
    return 2e-2 if rounds else 4e-6


@pytest.fixture(scope="module", params=DTYPES)
def long_case(request: pytest.FixtureRequest) -> Case:
    """Two sequences, one of which reaches into a second segment, of a model like SmolLM2."""
    return make_case(request.param, 9, 3, 64, 16, [1100, 70])


@pytest.mark.spread(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 32, 1), (8, 2, 80, 24), (8, 1, 128, 64), (6, 2, 40, 8)],
)
def test_attention_is_that_of_the_reference_on_what_the_pool_holds(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    """Unused slots, unused blocks and all other layers are NaN."""
    case = make_case(dtype, num_heads, num_kv_heads, head_dim, block_size, EDGES)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))


@pytest.mark.spread(1)
def test_a_long_context_is_that_of_the_reference(long_case: Case) -> None:
    result = long_case.attend(long_case.all_spans())
    bound = tolerance(long_case.setting.layout.dtype)
    np.testing.assert_allclose(result, long_case.out, rtol=0, atol=bound)


@pytest.mark.spread(2)
def test_tokens_one_by_one_have_the_bits_of_a_whole_prompt(long_case: Case) -> None:
    whole = long_case.attend([(0, 0, 1100)])
    for position in [*range(0, 70, 3), 127, 128, 1022, 1023, 1024, 1025, 1099]:
        alone = long_case.attend([(0, position, position + 1)])
        np.testing.assert_array_equal(alone[0], whole[position])


def test_ragged_chunks_beside_other_rows_have_the_bits_of_a_whole_prompt(long_case: Case) -> None:
    whole = long_case.attend([(0, 0, 1100)])
    other = long_case.attend([(1, 0, 70)])
    edges = [0, 1, 8, 27, 64, 191, 192, 700, 1023, 1030, 1100]
    for first, end in pairwise(edges):
        both = long_case.attend([(1, 3, 70), (0, first, end), (1, 0, 3)])
        np.testing.assert_array_equal(both[67 : 67 + end - first], whole[first:end])
        np.testing.assert_array_equal(both[:67], other[3:])


@pytest.mark.parametrize(("chunks", "workers"), [(1, 1), (2, 1), (5, 3), (40, 2)])
def test_bits_do_not_depend_on_chunks_and_threads(
    long_case: Case, chunks: int, workers: int
) -> None:
    spans = [(0, 900, 1100), (1, 0, 70)]
    expected = long_case.attend(spans)
    result = long_case.attend(spans, chunks=chunks, workers=workers)
    np.testing.assert_array_equal(result, expected)


def test_a_context_shared_among_threads_has_the_same_bits(long_case: Case) -> None:
    spans = [(0, 1099, 1100), (1, 69, 70), (0, 1024, 1025), (0, 1023, 1024)]
    expected = long_case.attend(spans)
    np.testing.assert_array_equal(long_case.attend(spans, threads=16, workers=2), expected)


def test_rows_that_share_blocks_and_rows_that_own_copies_have_the_same_bits(
    long_case: Case,
) -> None:
    case = make_case(long_case.setting.layout.dtype, 4, 2, 32, 16, [90, 90])
    data, tables = case.setting.data, case.tables
    # The second row shares four blocks with the first and has copies of the other two.
    data[tables[1, 4:6]] = data[tables[0, 4:6]]
    tables[1, :4] = tables[0, :4]
    case.queries[90:] = case.queries[:90]
    result = case.attend([(0, 0, 90), (1, 64, 90)])
    np.testing.assert_array_equal(result[90:], result[64:90])


def test_a_nan_in_the_context_reaches_the_rows_that_see_it_and_no_other(long_case: Case) -> None:
    dtype = long_case.setting.layout.dtype
    case = make_case(dtype, 3, 1, 64, 16, [40, 40])
    clean = case.attend([(0, 0, 20), (1, 0, 40)])
    layout = case.setting.layout
    block = case.setting.data[case.tables[0, 1]].reshape(2, -1)[1]
    block[layout.key_bytes :].fill(0xFF)  # V, with its scales, of positions 16 to 31
    result = case.attend([(0, 0, 16), (0, 39, 40), (1, 0, 40)])
    np.testing.assert_array_equal(result[:16], clean[:16])
    assert np.isnan(result[16]).all()
    np.testing.assert_array_equal(result[17:], clean[20:])
    if dtype == "float32":  # in tile registers a later token of the same item reaches all rows
        np.testing.assert_array_equal(case.attend([(0, 0, 40)])[:16], clean[:16])


def test_scores_that_jump_by_hundreds_neither_overflow_nor_lose_the_largest() -> None:
    for dtype in DTYPES:
        case = make_case(dtype, 3, 1, 32, 16, [200])
        case.queries *= np.float32(300)
        result = case.attend([(0, 0, 200)])
        assert np.isfinite(result).all()
        np.testing.assert_array_equal(case.attend([(0, 199, 200)])[0], result[199])


def test_items_cover_every_token_once_in_order() -> None:
    query_lens = np.array([1, 0, 40, 1, 17], np.int32)
    items = attention_items(query_lens, 3)
    assert items[:, 1].max() <= tokens_per_item(3)
    covered = [t for first, count, _, _ in items.tolist() for t in range(first, first + count)]
    assert covered == list(range(59))
    owners = np.repeat(np.arange(5), query_lens)
    for first, count, row, segment in items.tolist():
        assert set(owners[first : first + count].tolist()) == {row}
        assert segment == 0


def test_only_long_contexts_of_small_steps_are_shared() -> None:
    positions = np.array([3000, 10], np.int32)
    items = attention_items(np.ones(2, np.int32), 3)

    def share(threads: int) -> tuple[list[list[int]], list[list[int]]]:
        shared, merges = share_long_contexts(items, positions, ContextSharing(16, 3, threads))
        return shared.tolist(), merges.tolist()

    assert share(1) == (items.tolist(), [])
    assert share(2) == (
        [[0, 1, 0, 1], [0, 1, 0, 2], [0, 1, 0, 3], [1, 1, 1, 0]],
        [[0, 0, 3, 0]],
    )
    positions[0] = 900
    assert share(2) == (items.tolist(), [])


def test_threads_share_contexts_of_any_length_the_longest_first() -> None:
    def share(*lengths: int, most: int = SHARED_ITEMS) -> list[int]:
        """How many items each context becomes."""
        shared, merges = share_long_contexts(
            attention_items(np.ones(len(lengths), np.int32), 3),
            np.array(lengths, np.int32) - 1,
            ContextSharing(16, 8, 64, most),
        )
        assert len(shared) <= most
        assert [entry[2] for entry in merges.tolist()] == [
            count for count in np.bincount(shared[:, 2]).tolist() if count > 1
        ]
        counts: list[int] = np.bincount(shared[:, 2]).tolist()
        return counts

    assert share(1 << 18) == [256]
    assert share((1 << 18) + 1) == [1]
    assert share((1 << 18) + 1, most=most_shared_items(1 << 20, 16)) == [257]
    assert share(1 << 20, 1 << 20, most=most_shared_items(1 << 20, 16)) == [1024, 1024]
    # From the first one on that there is no room for they are left whole, and not all of them.
    assert share(90_000, 131_073, 90_000, 500, 30_000) == [88, 129, 1, 1, 1]
    assert most_shared_items(4096, 16) == SHARED_ITEMS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 64, 1000])
def test_every_shape_is_that_of_the_reference_and_its_decode_has_the_same_bits(
    dtype: str, head_dim: int, group: int, block_size: int
) -> None:
    lengths = [1, max(1, block_size - 1), block_size, block_size + 1, 63, 64, 65, 150]
    case = make_case(dtype, 2 * group, 2, head_dim, block_size, lengths)
    result = case.attend(case.all_spans())
    np.testing.assert_allclose(result, case.out, rtol=0, atol=tolerance(dtype))
    last = case.attend([(s, length - 1, length) for s, length in enumerate(lengths)])
    np.testing.assert_array_equal(last, result[case.starts + lengths - 1])
