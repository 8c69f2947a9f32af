from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels.cpu.attention_items import attention_items, tokens_per_item
from kernels.cpu.attention_plan import AttentionShape
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.kv_layout import VALUE_BYTES
from tests.kernels.cpu.attention_driver import SINKS, Case, make_case

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


@pytest.mark.parametrize(
    ("head_dim", "group", "window", "cap", "scale"),
    [
        (64, 3, 0, 0, 1), (64, 5, 0, 0, 30), (64, 3, 100, 0, 30), (64, 3, 0, 1.5, 1),
        (96, 3, 0, 0, 1), (128, 3, 0, 0, 30), (128, 5, 100, 0, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8"])
def test_row_blocks_of_an_item_have_the_bits_of_one(
    dtype: str, head_dim: int, group: int, window: int, cap: float, scale: int
) -> None:
    """Items of several go through tile registers side by side, where heads have such a size.

    `scale`: of queries, so that maxima are raised while other blocks are under way.
    """
    case = make_case(dtype, group, 1, head_dim, 16, [300], window, cap=cap)
    case.queries *= np.float32(scale)
    whole = case.attend([(0, 0, 300)])
    for first in range(0, 300, 3):
        np.testing.assert_array_equal(
            case.attend([(0, first, first + 3)]), whole[first : first + 3]
        )


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


@pytest.mark.spread(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (3, 1, 64, 16, 0),
        (4, 2, 64, 16, 1100),
        (4, 4, 32, 64, 0),
        (8, 1, 40, 24, 0),
        (4, 2, 64, 16, 70),
    ],
)
def test_rows_with_a_segment_in_common_have_the_bits_they_have_alone(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int
) -> None:
    """More rows than an item has tokens, behind one segment, two, and two of one's own."""
    lengths = [2060, 2052, 1100, 1040]
    sinks = SINKS if num_heads == len(SINKS) else None
    case = make_case(dtype, num_heads, num_kv_heads, head_dim, block_size, lengths, window, sinks)
    segment = AttentionShape(1, block_size, 1, 1).least_position
    one, two = (-(-count * segment // block_size) for count in (1, 2))
    case.tables[1, :two] = case.tables[0, :two]
    case.tables[2, :one] = case.tables[0, :one]
    spans = [
        (row, length - back, length - back + 1)
        for back in range(1, 20)
        for row, length in enumerate(lengths)
    ]
    expected = np.concatenate([case.attend([span]) for span in spans])
    plan = case.plan(spans)
    assert plan.items[:, 1].max() > 1
    assert len(plan.merges) > len(spans) // 2
    result = case.attend(spans, chunks=5, workers=3)
    np.testing.assert_array_equal(result, expected)


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
