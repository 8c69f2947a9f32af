"""Which experts tokens go through, the rows between both, and what comes out of them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kernels.cpu.operands import RowFormat, row_bytes
from kernels.reference import mixture as reference
from kernels.reference.rms_norm import rms_norm
from tests.amx.sets import sets_that_run
from tests.kernels.cpu.operation_calls import Int8Rows
from tests.kernels.cpu.routing_driver import Mixture, digest, drawn

SHAPES = [(1, 1, 1), (1, 8, 2), (3, 5, 5), (37, 128, 8), (64, 33, 1), (5, 1024, 64)]
"""Tokens, experts, experts of a token."""


@pytest.mark.parametrize(("tokens", "experts", "per_token"), SHAPES)
@pytest.mark.parametrize("normalises", [False, True])
def test_experts_and_their_weights_are_those_of_the_reference(
    tokens: int, experts: int, per_token: int, normalises: bool
) -> None:
    mixture = drawn(tokens, experts, per_token)
    mixture.normalises = normalises
    mixture.run("route_tokens", range(3))
    chosen, weights = np.empty((tokens, per_token), np.int32), np.empty((tokens, per_token), "f4")
    reference.route(mixture.logits, normalises=normalises, chosen=chosen, weights=weights)
    np.testing.assert_array_equal(mixture.chosen[:tokens], chosen)
    np.testing.assert_allclose(mixture.weights[:tokens], weights, rtol=2e-6)
    mixture.check_ends()


@pytest.mark.parametrize(("tokens", "experts", "per_token"), SHAPES)
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
def test_scores_may_be_sigmoids_and_corrected_where_experts_are_chosen(
    tokens: int, experts: int, per_token: int, normalises: bool, is_sigmoid: bool, corrects: bool
) -> None:
    mixture, random = drawn(tokens, experts, per_token, 1), np.random.default_rng(experts)
    mixture.normalises, mixture.is_sigmoid, mixture.scale = normalises, is_sigmoid, 2.5
    if corrects:
        spread = 0.5 if is_sigmoid else 2 / experts
        mixture.correction = spread * random.standard_normal(experts, np.float32)
    mixture.run("route_tokens", range(3))
    chosen, weights = np.empty((tokens, per_token), np.int32), np.empty((tokens, per_token), "f4")
    reference.route(
        mixture.logits, normalises=normalises, chosen=chosen, weights=weights,
        is_sigmoid=is_sigmoid, correction=mixture.correction, scale=2.5,
    )  # fmt: skip
    np.testing.assert_array_equal(mixture.chosen[:tokens], chosen)
    np.testing.assert_allclose(mixture.weights[:tokens], weights, rtol=3e-6)
    mixture.check_ends()


@pytest.mark.parametrize("normalises", [False, True])
def test_weights_of_an_expert_are_multiplied_by_its_number(normalises: bool) -> None:
    mixture, random = drawn(9, 20, 5), np.random.default_rng(2)
    mixture.normalises, mixture.expert_scales = normalises, random.standard_normal(20, np.float32)
    mixture.run("route_tokens", range(2))
    chosen, weights = np.empty((9, 5), np.int32), np.empty((9, 5), "f4")
    reference.route(
        mixture.logits, normalises=normalises, chosen=chosen, weights=weights,
        expert_scales=mixture.expert_scales,
    )  # fmt: skip
    np.testing.assert_array_equal(mixture.chosen[:9], chosen)
    np.testing.assert_allclose(mixture.weights[:9], weights, rtol=2e-6)
    mixture.check_ends()


def test_a_correction_decides_who_is_chosen_and_nothing_else() -> None:
    """Experts 3 and 1 have the largest logits, 0 and 2 the largest corrections."""
    logits = np.array([[0, 1, -1, 2]], np.float32)
    mixture = Mixture(logits, 2, normalises=False, is_sigmoid=True)
    mixture.correction = np.float32([3, 0, 2, 0])
    mixture.run("route_tokens")
    assert mixture.chosen[0].tolist() == [0, 2]
    np.testing.assert_allclose(mixture.weights[0], 1 / (1 + np.exp([0.0, 1.0])), rtol=1e-6)


def test_sigmoids_of_large_logits_are_one_and_those_of_small_ones_nearly_nothing() -> None:
    mixture = Mixture(np.float32([[-3e38, -200, -30, 0, 30, 3e38]]), 6, is_sigmoid=True)
    mixture.normalises = False
    mixture.run("route_tokens")
    assert mixture.chosen[0].tolist() == [5, 4, 3, 2, 1, 0]
    weights = mixture.weights[0].tolist()
    assert weights[:3] == [1.0, 1.0, 0.5]
    assert weights[3] == pytest.approx(np.exp(-30), rel=1e-5)
    assert all(0 <= weight < 1e-37 for weight in weights[4:])


def test_sigmoids_that_are_nothing_together_weigh_nothing() -> None:
    mixture = Mixture(np.float32([[-200, -300, -250]]), 2, is_sigmoid=True)
    mixture.run("route_tokens")
    assert mixture.chosen[0].tolist() == [0, 2]
    assert (mixture.weights[0] < 1e-17).all()


def test_of_equal_logits_the_lower_number_goes_first_and_small_ones_count_as_little() -> None:
    logits = np.array([[1, 7, 7, -3e38, 7, 1], [0, 0, 0, 0, 0, 0]], np.float32)
    mixture = Mixture(logits, 6)
    mixture.run("route_tokens")
    assert mixture.chosen[0].tolist() == [1, 2, 4, 0, 5, 3]
    assert mixture.chosen[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert mixture.weights[0, 5] < 1e-37
    np.testing.assert_allclose(mixture.weights[1], 1 / 6, rtol=1e-6)


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [9, 7, 1])
@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("is_sigmoid", "corrects"), [(False, False), (True, False), (True, True)])
def test_a_row_that_is_not_finite_has_no_weights_and_experts_that_exist(
    spoiled: float, count: int, normalises: bool, is_sigmoid: bool, corrects: bool
) -> None:
    mixture = drawn(3, 9, 4)
    mixture.normalises, mixture.is_sigmoid = normalises, is_sigmoid
    mixture.correction = np.zeros(9, np.float32) if corrects else None
    mixture.logits[1, :count] = spoiled
    mixture.routed()
    assert np.isnan(mixture.weights[1]).all()
    assert np.isfinite(mixture.weights[[0, 2]]).all()
    assert ((mixture.chosen[:3] >= 0) & (mixture.chosen[:3] < 9)).all()
    check_rows(mixture)


def check_rows(mixture: Mixture) -> None:
    """Check that rows are sorted by expert, tokens in order, and that both know of each other."""
    count = mixture.num_tokens * mixture.per_token
    chosen, places = mixture.chosen[: mixture.num_tokens], mixture.places[: mixture.num_tokens]
    num_runs = mixture.runs[0]
    runs = mixture.runs[1 : 1 + 3 * num_runs].reshape(-1, 3)
    assert sorted(places.reshape(-1).tolist()) == list(range(count))
    np.testing.assert_array_equal(
        mixture.tokens[places], np.arange(mixture.num_tokens)[:, None] + 0 * places
    )
    assert runs[:, 0].tolist() == sorted(set(chosen.reshape(-1).tolist()))
    end = 0
    for expert, first, rows in runs.tolist():
        assert first == end
        end = first + rows
        assert mixture.tokens[first:end].tolist() == sorted(mixture.tokens[first:end].tolist())
        assert ((first <= places) & (places < end)).tolist() == (chosen == expert).tolist()
    assert end == count
    mixture.check_ends()


@pytest.mark.parametrize(("tokens", "experts", "per_token"), SHAPES)
def test_rows_are_sorted_by_expert_and_tokens_know_theirs(
    tokens: int, experts: int, per_token: int
) -> None:
    check_rows(drawn(tokens, experts, per_token).routed())


def test_experts_have_the_rows_of_their_tokens_with_all_that_stands_beside() -> None:
    mixture, k = drawn(11, 6, 3).routed(), 96
    random = np.random.default_rng(0)
    scales = random.uniform(0.1, 1, (11, 3)).astype(np.float32)
    source = Int8Rows.of(random.integers(-120, 121, (11, k)).astype(np.int8), scales)
    out = Int8Rows.empty(33, k)
    names = ("scales", "scaled_sums", "sums", "pair_sums", "begins")
    beside = np.array(
        [[getattr(rows, name).ctypes.data for rows in (source, out)] for name in names], np.int64
    )
    mixture.run(
        "rows_of_experts", range(4), source=source.values.ctypes.data,
        out=out.values.ctypes.data, row_bytes=k, beside=beside.ctypes.data, group_bytes=4 * 3,
    )  # fmt: skip
    for name in ("values", *names):
        expected = getattr(source, name)[mixture.tokens[:33]]
        np.testing.assert_array_equal(getattr(out, name)[:33], expected)
    assert (out.values[33:] == 77).all()
    assert (out.sums[33:] == 12345).all()


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.FLOAT32])
def test_rows_of_floats_are_copied_alone(row_format: RowFormat) -> None:
    mixture, k = drawn(5, 4, 2).routed(), 33
    size = row_bytes(row_format, 1, k)
    source = np.random.default_rng(0).integers(0, 256, (5, size), np.uint8)
    out = np.full((12, size), 9, np.uint8)
    mixture.run("rows_of_experts", source=source.ctypes.data, out=out.ctypes.data, row_bytes=size)
    np.testing.assert_array_equal(out[:10], source[mixture.tokens[:10]])
    assert (out[10:] == 9).all()


@pytest.mark.parametrize("n", [1, 16, 100])
def test_what_experts_give_is_weighed_and_added_to_the_tokens_of_the_piece(n: int) -> None:
    mixture, random = drawn(13, 20, 5).routed(), np.random.default_rng(n)
    given = random.standard_normal((65, n), np.float32)
    hidden = random.standard_normal((17, n), np.float32)
    expected = hidden.copy()
    reference.add_experts(given[mixture.places[:13]], mixture.weights[:13], expected[2:15])
    mixture.run(
        "add_experts", range(4), first_token=2, source=given.ctypes.data,
        out=hidden.ctypes.data, n=n,
    )  # fmt: skip
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(hidden[[0, 1, 15, 16]], expected[[0, 1, 15, 16]])


@pytest.mark.parametrize("n", [1, 16, 100])
def test_what_experts_give_may_be_normed_before_it_is_added(n: int) -> None:
    mixture, random = drawn(13, 20, 5).routed(), np.random.default_rng(n)
    given, norm = random.standard_normal((65, n), np.float32), random.standard_normal(n, np.float32)
    hidden = random.standard_normal((17, n), np.float32)
    sums, normed = np.zeros((13, n), np.float32), np.empty((13, n), np.float32)
    reference.add_experts(given[mixture.places[:13]], mixture.weights[:13], sums)
    rms_norm(sums, norm, 1e-3, normed)
    expected = hidden.copy()
    expected[2:15] += normed
    mixture.run(
        "add_experts", range(4), first_token=2, source=given.ctypes.data, out=hidden.ctypes.data,
        n=n, norm=norm.ctypes.data, epsilon=int(np.float32(1e-3).view(np.uint32)),
    )  # fmt: skip
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 16, 100])
def test_biases_of_experts_are_weighed_with_what_they_gave(n: int) -> None:
    mixture, random = drawn(13, 7, 3).routed(), np.random.default_rng(n)
    given, biases = (random.standard_normal((rows, n), np.float32) for rows in (39, 7))
    hidden = random.standard_normal((13, n), np.float32)
    expected = hidden.copy()
    of_tokens = given[mixture.places[:13]] + biases[mixture.chosen[:13]]
    reference.add_experts(of_tokens, mixture.weights[:13], expected)
    mixture.run(
        "add_experts", range(2), source=given.ctypes.data, out=hidden.ctypes.data, n=n,
        biases=biases.ctypes.data,
    )  # fmt: skip
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 16, 100])
def test_what_all_tokens_go_through_is_added_by_its_gate(n: int) -> None:
    mixture, random = drawn(13, 2, 1), np.random.default_rng(n)
    given = random.standard_normal((13, n), np.float32)
    gates = np.concatenate([np.float32([-90, 40, 0]), random.standard_normal(10, np.float32)])
    hidden = random.standard_normal((17, n), np.float32)
    expected = hidden.copy()
    reference.add_shared(given, gates, expected[2:15])
    mixture.run(
        "add_shared", range(4), first_token=2, logits=gates.ctypes.data,
        source=given.ctypes.data, out=hidden.ctypes.data, n=n,
    )  # fmt: skip
    np.testing.assert_allclose(hidden, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(hidden[[0, 1, 15, 16]], expected[[0, 1, 15, 16]])


def test_a_token_gets_the_same_bits_wherever_its_rows_lie() -> None:
    """In company the rows of its experts come in another order than alone."""
    mixture, n = drawn(30, 10, 4).routed(), 64
    each = np.random.default_rng(3).standard_normal((30, 10, n), np.float32)

    def added(of: Mixture, tokens: np.ndarray) -> np.ndarray:
        given = np.zeros((len(tokens) * 4, n), np.float32)
        for t, token in enumerate(tokens):
            given[of.places[t]] = each[token, of.chosen[t]]
        hidden = np.ones((len(tokens), n), np.float32)
        of.run("add_experts", source=given.ctypes.data, out=hidden.ctypes.data, n=n)
        return hidden

    together = added(mixture, np.arange(30))
    for token in range(30):
        one = Mixture(mixture.logits[token : token + 1].copy(), 4).routed()
        np.testing.assert_array_equal(one.weights[0], mixture.weights[token])
        np.testing.assert_array_equal(added(one, np.array([token]))[0], together[token])


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits() -> None:
    answers = {digest()}
    for chosen in sets_that_run():
        program = [sys.executable, "-m", "tests.kernels.cpu.routing_driver", chosen.name]
        done = subprocess.run(program, check=True, capture_output=True, text=True)
        answers.add(done.stdout.strip())
    assert len(answers) == 1
