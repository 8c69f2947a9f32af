from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.philox import philox_4x32
from kernels.reference.sampling import draw, integer_weights, nucleus
from kernels.reference.sampling import sample as reference

sys.path.insert(0, str(Path(__file__).parent / "cpu"))
from sampling_driver import cpu_uniform
from sampling_driver import sample_columns as cpu

both = pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])


def run(
    kernels, logits, temperatures, top_ps, seeds=None, positions=None, rows=None,
    sample_indexes=None,
):  # fmt: skip
    """Sample once per temperature; row k of the logits unless `rows` says otherwise."""
    count = len(temperatures)
    out, finite = np.full(count, -1, dtype=np.int32), np.zeros(count, dtype=np.bool_)
    kernels(
        np.ascontiguousarray(logits, dtype=np.float32),
        np.arange(count, dtype=np.int32) if rows is None else np.asarray(rows, dtype=np.int32),
        np.asarray(temperatures, dtype=np.float64),
        np.asarray(top_ps, dtype=np.float64),
        np.arange(count, dtype=np.uint64) if seeds is None else np.asarray(seeds, dtype=np.uint64),
        np.zeros(count, dtype=np.int64)
        if sample_indexes is None
        else np.asarray(sample_indexes, dtype=np.int64),
        np.arange(count) if positions is None else np.asarray(positions, dtype=np.int64),
        out,
        finite,
    )
    return out, finite


def repeated(
    kernels, row: Sequence[float], temperature: float, top_p: float, count: int = 4000
) -> np.ndarray:
    """Return how often each token of a row is drawn at many positions, as a share."""
    tokens, _ = run(
        kernels, [row], [temperature] * count, [top_p] * count, seeds=[7] * count,
        rows=[0] * count,
    )  # fmt: skip
    return np.bincount(tokens, minlength=len(row)) / count


def test_philox_gives_the_published_vectors() -> None:
    ones = 0xFFFFFFFF
    assert philox_4x32((0, 0, 0, 0), (0, 0)) == (
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    )  # fmt: skip
    assert philox_4x32((ones,) * 4, (ones,) * 2) == (
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
    )  # fmt: skip
    assert philox_4x32(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(
    vocab=st.integers(1, 400),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    rounding=st.sampled_from([0, 1, 6]),
    temperature=st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.floats(1e-9, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_cpu_draws_the_tokens_of_the_reference(
    vocab, spread, rounding, temperature, top_p, seed
) -> None:
    random = np.random.default_rng(seed)
    # Rounded logits have many ties.
    logits = np.round(random.standard_normal((4, vocab)) * spread, rounding)
    arguments = (logits, [temperature] * 4, [top_p] * 4, [seed] * 4)
    np.testing.assert_array_equal(run(cpu, *arguments)[0], run(reference, *arguments)[0])


def test_the_cpu_draws_the_tokens_of_the_reference_from_a_real_vocabulary() -> None:
    logits = np.random.default_rng(5).standard_normal((40, 49152)) * 2.5
    temperatures, top_ps = [0.8, 1.0] * 20, [0.9] * 20 + [1.0] * 20
    expected, _ = run(reference, logits, temperatures, top_ps)
    np.testing.assert_array_equal(run(cpu, logits, temperatures, top_ps)[0], expected)


@both
def test_greedy_takes_the_lowest_id_among_equals(kernels) -> None:
    tokens, finite = run(kernels, [[1, 3, 3, 2], [-5, -5, -5, -5]], [0, 0], [1, 1])
    assert tokens.tolist() == [1, 0]
    assert finite.all()


@both
def test_draws_follow_the_softmax_of_logits_over_temperature(kernels) -> None:
    row = [2.0, 1.0, 0.0, -1.0]
    expected = np.exp(np.array(row) / 0.7)
    np.testing.assert_allclose(
        repeated(kernels, row, 0.7, 1.0), expected / expected.sum(), atol=0.03
    )


KEYS = {
    "positions": lambda i: (7, 3, i),
    "sample indexes": lambda i: (7, i, 3),
    "seeds": lambda i: (i, 7, 3),
    "all three": lambda i: (i * 0x9E3779B97F4A7C15 % 2**64, i % 5, i // 5),
}


@pytest.mark.spread(4)
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 0.8)])
def test_draws_along_each_key_fit_their_distribution(key, temperature, top_p) -> None:
    """Pearson's χ² over the tokens that may be drawn; the keys are fixed, so it never flickers."""
    count = 50_000
    row = np.random.default_rng(11).standard_normal(30) * 1.5
    expected = np.exp((row - row.max()) / temperature)
    expected /= expected.sum()
    order = np.argsort(-expected)
    dropped = order[int(np.searchsorted(np.cumsum(expected[order]), top_p)) + 1 :]
    expected[dropped] = 0
    expected *= count / expected.sum()

    seeds, sample_indexes, positions = zip(*map(key, range(count)), strict=True)
    tokens, _ = run(
        cpu, [row], [temperature] * count, [top_p] * count, seeds, positions,
        rows=np.zeros(count), sample_indexes=sample_indexes,
    )  # fmt: skip
    drawn = np.bincount(tokens, minlength=len(row))
    assert not drawn[expected == 0].any()
    possible = expected > 0
    chi_square = ((drawn - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    # The distribution has mean `freedom` and variance 2 · `freedom`.
    assert abs(chi_square - freedom) < 3.5 * np.sqrt(2 * freedom)


def test_neighbouring_draws_are_independent() -> None:
    numbers = np.array([cpu_uniform(np.uint64(7), i // 1000, i % 1000) for i in range(100_000)])
    for lag in (1, 2, 1000):  # the next positions, the next sample
        pairs = np.floor(numbers[:-lag] * 8) * 8 + np.floor(numbers[lag:] * 8)
        expected = len(pairs) / 64
        chi_square = ((np.bincount(pairs.astype(int), minlength=64) - expected) ** 2).sum()
        assert abs(chi_square / expected - 63) < 3.5 * np.sqrt(2 * 63)


@pytest.mark.spread(4)
@both
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {0, 1, 3}), (1.0, {0, 1, 2, 3})],
)
def test_the_nucleus_is_the_shortest_prefix_of_likeliest_tokens_reaching_top_p(
    kernels, top_p, kept
) -> None:
    row = np.log([0.2, 0.4, 0.1, 0.3])
    assert set(np.flatnonzero(repeated(kernels, row.tolist(), 1.0, top_p, count=1000))) == kept


@both
def test_of_equally_likely_tokens_the_nucleus_keeps_the_lowest_ids(kernels) -> None:
    shares = repeated(kernels, [1.0] * 8, 1.0, 0.5, count=1000)
    assert set(np.flatnonzero(shares)) == {0, 1, 2, 3}


def test_a_number_just_below_one_draws_the_last_kept_token() -> None:
    weights = integer_weights(np.array([0, 1, 0], dtype=np.float32), 1.0)
    assert draw(weights, 1 - 2**-53) == 2
    assert draw(weights, 0.0) == 0
    assert nucleus(weights, 1e-12).tolist() == [False, True, False]


@pytest.mark.parametrize(("u", "token"), [(0.0, 0), (0.25, 1), (0.5 - 2**-50, 1), (0.5, 2)])
def test_a_number_on_the_edge_between_two_tokens_draws_the_upper_one(u: float, token: int) -> None:
    assert draw(integer_weights(np.zeros(4, dtype=np.float32), 1.0), u) == token


@both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_logit_that_is_not_finite_fails_alone(kernels, bad) -> None:
    logits = np.zeros((3, 50), dtype=np.float32)
    logits[:, 4] = 1
    logits[1, 49] = bad
    for temperature in (0.0, 1.0):
        tokens, finite = run(kernels, logits, [temperature] * 3, [0.01] * 3)
        assert finite.tolist() == [True, False, True]
        assert tokens.tolist() == [4, 0, 4]


@both
def test_a_draw_depends_on_seed_sample_index_and_position_and_on_nothing_else(kernels) -> None:
    row = np.random.default_rng(6).standard_normal(1000)
    other = np.random.default_rng(8).standard_normal((3, 1000))
    logits = np.stack([other[0], row, other[1], row, other[2]])
    tokens, _ = run(
        kernels, logits, [1.0] * 5, [0.95] * 5, seeds=[9, 5, 9, 5, 9], positions=[1, 40, 2, 40, 3]
    )
    alone, _ = run(kernels, [row], [1.0], [0.95], seeds=[5], positions=[40])
    assert tokens[1] == tokens[3] == alone[0]
    many, _ = run(kernels, [row], [1.0] * 64, [0.95] * 64, seeds=[5] * 64, rows=[0] * 64)
    assert len(set(many.tolist())) > 20
