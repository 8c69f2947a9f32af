from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.registry import load_kernels

reference, cpu = load_kernels("reference"), load_kernels("cpu")
LAYER = 1


@dataclass
class Case:
    """Ragged rows over a shuffled pool whose unused slots all hold NaN."""

    q: np.ndarray
    pool: np.ndarray
    tables: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    @property
    def num_items(self) -> int:
        return len(self.q) * self.pool.shape[3]

    def attend(self, kernels, first: int = 0, end: int | None = None) -> np.ndarray:
        out = np.full_like(self.q, -1)
        end = self.num_items if end is None else end
        kernels.paged_attention(
            self.q, self.pool, LAYER, self.tables, self.rows, self.positions,
            self.q.shape[2] ** -0.5, first, end, out,
        )  # fmt: skip
        return out


def make_case(
    lengths: list[int],
    queries: list[int],
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    block_size: int = 4,
    num_shared: int = 0,
    seed: int = 0,
) -> Case:
    """Row r has `lengths[r]` positions, the last `queries[r]` of them are computed.

    The first `num_shared` blocks of all rows are the same ones, where rows are long enough.
    """
    random = np.random.default_rng(seed)
    needed = [-(-length // block_size) for length in lengths]
    width, num_blocks = max(needed), sum(needed) + num_shared + 2
    free = [int(block) for block in random.permutation(num_blocks)]
    shared = [free.pop() for _ in range(num_shared)]
    pool = np.full((num_blocks, 2, 2, kv_heads, block_size, head_dim), np.nan, dtype=np.float32)
    tables = np.full((len(lengths), width), -7, dtype=np.int32)
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        # Only full blocks are shared: a row's own tail must not fill another's.
        whole = min(num_shared, length // block_size)
        blocks = shared[:whole] + [free.pop() for _ in range(count - whole)]
        tables[row, :count] = blocks
        for position in range(length):
            slot = pool[blocks[position // block_size], LAYER, :, :, position % block_size]
            slot[:] = random.standard_normal(slot.shape, dtype=np.float32)
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), queries)
    positions = np.concatenate(
        [np.arange(n - q, n, dtype=np.int32) for n, q in zip(lengths, queries, strict=True)]
    )
    q = random.standard_normal((len(rows), kv_heads * group, head_dim), dtype=np.float32) * 3
    return Case(q, pool, tables, rows, positions)


row_shapes = st.lists(
    st.integers(1, 70).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length))),
    min_size=1,
    max_size=4,
)


@given(
    shapes=row_shapes,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 20, 64]),
    block_size=st.sampled_from([1, 2, 5, 16, 32]),
    num_shared=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_agrees_with_the_reference_on_ragged_rows_and_ignores_unused_slots(
    shapes, kv_heads, group, head_dim, block_size, num_shared, seed
) -> None:
    lengths, queries = ([shape[i] for shape in shapes] for i in (0, 1))
    case = make_case(
        lengths, queries, kv_heads=kv_heads, group=group, head_dim=head_dim,
        block_size=block_size, num_shared=num_shared, seed=seed,
    )  # fmt: skip
    actual = case.attend(cpu)
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, case.attend(reference), rtol=2e-5, atol=2e-6)


def test_the_lengths_around_a_block_edge_agree_with_the_reference() -> None:
    lengths = [1, 15, 16, 17, 31, 32, 33, 1024]
    case = make_case(lengths, [1] * len(lengths), head_dim=64, block_size=16)
    np.testing.assert_allclose(case.attend(cpu), case.attend(reference), rtol=2e-5, atol=2e-6)


def test_the_reference_is_softmax_attention_in_float64() -> None:
    case = make_case([37], [5], kv_heads=1, group=1)
    keys, values = (
        case.pool[case.tables[0], LAYER, which, 0].reshape(-1, 16)[:37].astype(np.float64)
        for which in (0, 1)
    )
    for out, q, position in zip(case.attend(reference), case.q, case.positions, strict=True):
        scores = keys[: position + 1] @ q[0] / 4
        weights = np.exp(scores - scores.max())
        expected = weights @ values[: position + 1] / weights.sum()
        np.testing.assert_allclose(out[0], expected, rtol=1e-5, atol=1e-6)


@given(shapes=row_shapes, cut=st.floats(0, 1), seed=st.integers(0, 1000))
def test_a_range_of_items_is_the_same_bits_as_in_one_call_and_touches_nothing_else(
    shapes, cut, seed
) -> None:
    case = make_case([shape[0] for shape in shapes], [shape[1] for shape in shapes], seed=seed)
    middle = round(cut * case.num_items)
    whole = case.attend(cpu)
    halves = (case.attend(cpu, 0, middle), case.attend(cpu, middle, case.num_items))
    item = np.arange(case.num_items).reshape(len(case.q), 2).repeat(3, axis=1)  # of [T, H]
    np.testing.assert_array_equal(halves[0][item < middle], whole[item < middle])
    np.testing.assert_array_equal(halves[1][item >= middle], whole[item >= middle])
    assert (halves[0][item >= middle] == -1).all()
    assert (halves[1][item < middle] == -1).all()


def test_a_token_is_the_same_bits_as_a_decode_row_and_inside_a_prefill_row() -> None:
    case = make_case([67, 40], [67, 40], head_dim=64, block_size=16)
    whole = case.attend(cpu)
    for token in range(len(case.q)):
        alone = Case(
            case.q[token : token + 1],
            case.pool,
            case.tables[case.rows[token], None],
            np.zeros(1, dtype=np.int32),
            case.positions[token : token + 1],
        )
        np.testing.assert_array_equal(alone.attend(cpu)[0], whole[token])


def test_a_nan_inside_a_rows_own_context_reaches_its_output() -> None:
    case = make_case([20, 20], [1, 1])
    case.pool[case.tables[0, 1], LAYER, 0, 0, 2] = np.nan
    out = case.attend(cpu)
    assert np.isnan(out[0, :3]).any()
    assert np.isfinite(out[1]).all()
