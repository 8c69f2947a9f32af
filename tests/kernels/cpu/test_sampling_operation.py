"""The sampling operation chooses what `kernels.reference.sampling` says, for every parameter."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference.exponential import exp, log
from kernels.reference.philox import uniform
from kernels.reference.sampling import Choice, integer_weights

sys.path.insert(0, str(Path(__file__).parent))
from sampling_driver import (
    Asked,
    adjustments,
    cpu_uniform,
    run,
    sample_all,
    specified,
    weights_of,
)

VOCABULARIES = [1, 2, 63, 64, 65, 200, 1025, 3000]


@st.composite
def questions(draw) -> tuple[np.ndarray, list[Asked]]:
    """Rows of logits, often with many ties, and samples with any parameters."""
    vocab = draw(st.sampled_from(VOCABULARIES))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    logits = np.round(
        random.standard_normal((2, vocab)) * spread, draw(st.sampled_from([0, 1, 6]))
    ).astype(np.float32)
    off = st.just
    asked = []
    for _ in range(3):
        num_history = draw(st.integers(0, 40))
        adjust = adjustments(
            draw(
                st.dictionaries(
                    st.integers(0, vocab - 1),
                    st.sampled_from([-100.0, 100.0, -3e38, 1.5, 0.1]),
                    max_size=5,
                )
            ),
            random.integers(0, min(vocab, 12), num_history),
            draw(st.integers(0, num_history)),
            allowed=draw(off(None) | st.lists(st.integers(0, vocab - 1), min_size=1)),
            vocab=vocab,
            repetition_penalty=draw(off(1.0) | st.floats(0.01, 10)),
            presence_penalty=draw(off(0.0) | st.floats(-2, 2)),
            frequency_penalty=draw(off(0.0) | st.floats(-2, 2)),
        )
        choice = Choice(
            temperature=draw(st.sampled_from([0.0, 1e-300, 1e-3, 0.7, 1.0, 2.0])),
            top_p=draw(off(1.0) | st.floats(1e-9, 1.0)),
            seed=draw(st.integers(0, 2**64 - 1)),
            sample_index=draw(st.integers(0, 3)),
            position=draw(st.integers(0, 2**31)),
            top_k=draw(off(0) | st.integers(1, vocab + 2) | st.integers(1, 2**32 - 1)),
            min_p=draw(off(0.0) | st.floats(0, 1)),
            adjustments=adjust,
        )
        asked.append(
            Asked(
                choice,
                draw(st.integers(0, 1)),
                num_logprobs=draw(off(-1) | st.integers(0, 20)),
                given_token=draw(off(-1) | st.integers(0, vocab - 1)),
            )
        )
    return logits, asked


@settings(deadline=None)
@given(questions())
def test_the_operation_answers_what_the_specification_says(question) -> None:
    logits, asked = question
    assert run(logits, asked) == [specified(logits, one) for one in asked]


PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "a tiny temperature": {"temperature": 1e-300},
    "top-k": {"temperature": 1.0, "top_k": 40},
    "a top-k above the number of blocks": {"temperature": 1.0, "top_k": 5000},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-p near one": {"temperature": 2.0, "top_p": 0.9999},
    "min-p": {"temperature": 1.0, "min_p": 0.02},
    "all cuts": {"temperature": 1.3, "top_k": 300, "top_p": 0.95, "min_p": 0.003},
}


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_each_parameter_works_on_a_real_vocabulary(parameters) -> None:
    random = np.random.default_rng(5)
    logits = (random.standard_normal((3, 49152)) * 2.5).astype(np.float32)
    logits[2] = np.round(logits[2])  # thousands of tokens tie
    asked = [
        Asked(Choice(**{"top_p": 1.0, **parameters}, seed=i, sample_index=0, position=i), i % 3, 5)
        for i in range(6)
    ]
    assert run(logits, asked) == [specified(logits, one) for one in asked]


ADJUSTED = {
    "bias": {"bias": {7: 3.0, 40000: -100.0}},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.7},
    "all": {"bias": {3: 4.0}, "repetition_penalty": 1.1, "presence_penalty": 0.5,
            "frequency_penalty": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("parameters", ADJUSTED.values(), ids=ADJUSTED.keys())
def test_bias_and_penalties_work_on_a_real_vocabulary(parameters, temperature: float) -> None:
    random = np.random.default_rng(6)
    logits = (random.standard_normal((2, 49152)) * 2).astype(np.float32)
    history = random.integers(0, 300, 2000)
    logits[:, :300] += 6  # what was written before is likely, so penalties matter
    asked = [
        Asked(
            Choice(temperature, 0.9, i, 0, i, adjustments=adjustments(
                history=history, num_prompt=500, **parameters)),
            i % 2, 3,
        )
        for i in range(6)
    ]  # fmt: skip
    assert run(logits, asked) == [specified(logits, one) for one in asked]


@pytest.mark.spread(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("bias", [{}, {7: -100.0, 9: -3e38, 49151: -3.4e38}])
def test_only_allowed_tokens_are_chosen(temperature: float, bias: dict[int, float]) -> None:
    random = np.random.default_rng(8)
    logits = (random.standard_normal((2, 49152)) * 3).astype(np.float32)
    logits[1, [9, 49151]] = -np.finfo(np.float32).max  # as unlikely as can be
    for allowed in ([7], [49151], [9, 49151], list(range(5, 49152, 11))):
        asked = [
            Asked(
                Choice(temperature, 0.9, i, 0, i, top_k=3 * (i % 2), adjustments=adjustments(
                    bias, allowed=allowed, vocab=49152)),
                i % 2, 3,
            )
            for i in range(6)
        ]  # fmt: skip
        answers = run(logits, asked)
        assert answers == [specified(logits, one) for one in asked]
        assert {answer.token for answer in answers} <= set(allowed)
        # Log-probabilities are the model's own, whatever is allowed.
        plain = run(logits, [Asked(Choice(0.0, 1.0, 0, 0, 0), i, 3) for i in range(2)])
        assert [answer.top for answer in answers[:2]] == [answer.top for answer in plain]


@settings(deadline=None)  # the first call compiles
@given(
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 2**31 - 1),
    position=st.integers(0, 2**40),
)
def test_the_random_number_of_the_operation_is_the_specified_one(seed, sample_index, position):
    assert cpu_uniform(np.uint64(seed), sample_index, position) == uniform(
        seed, sample_index, position
    )


def test_the_exponential_and_the_logarithm_are_those_of_the_mathematical_library() -> None:
    x = -np.concatenate([np.linspace(0, 29.9, 20001), np.logspace(-18, 1, 2001)])
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=5e-16)
    assert exp(np.array([0.0]))[0] == 1.0
    for value in np.concatenate([np.linspace(1, 5, 1001), np.logspace(0, 6, 1001)]).tolist():
        assert log(value) == pytest.approx(np.log(value), rel=4e-16, abs=2e-16)


def greedy(**parameters) -> Choice:
    return Choice(0.0, 1.0, 0, 0, 0, adjustments=adjustments(**parameters))


def drawn(row, count: int = 400, **parameters) -> set[int]:
    """Which tokens come of many draws from one row."""
    choices = [
        Choice(**{"temperature": 1.0, "top_p": 1.0, **parameters}, seed=7, sample_index=0,
               position=i)
        for i in range(count)
    ]  # fmt: skip
    return set(sample_all(np.array([row], dtype=np.float32), choices))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_every_weight_of_a_large_vocabulary_is_the_specified_integer(temperature: float) -> None:
    """Products not rounded before they are added to change one weight of some 100 000."""
    row = np.random.default_rng(5).random(262_144, np.float32)
    np.testing.assert_array_equal(weights_of(row, temperature), integer_weights(row, temperature))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    zeros = np.zeros((1, 130), dtype=np.float32)
    zeros[0, :3] = -0.0
    assert sample_all(zeros, [greedy()]) == [0]
    zeros[0, [70, 128]] = 3
    assert sample_all(zeros, [greedy()]) == [70]


def test_top_k_keeps_exactly_k_tokens_and_of_equals_the_lowest_ids() -> None:
    assert drawn([1.0] * 200, top_k=3) == {0, 1, 2}
    assert drawn([0.0, 2.0, 0.0, 1.0, 0.0], top_k=3) == {0, 1, 3}
    assert drawn([0.0, 2.0, 2.0], top_k=1) == {1}
    everything = set(range(5))
    assert drawn([1.0] * 5, top_k=5) == drawn([1.0] * 5, top_k=6) == everything
    assert drawn([1.0] * 5, top_k=2**32 - 1) == drawn([1.0] * 5, top_k=0) == everything


def test_the_nucleus_is_taken_from_what_top_k_has_left() -> None:
    # Of four equal tokens, top-k leaves two; half of those is one, half of all would be two.
    assert drawn([1.0] * 4, top_k=2, top_p=0.5) == {0}
    assert drawn([1.0] * 4, top_p=0.5) == {0, 1}
    # Top-k cuts among the equals below, the nucleus among those above.
    assert drawn([3.0, 3.0, 3.0, 0.0, 0.0], top_k=4, top_p=0.6) == {0, 1}
    assert drawn([3.0, 3.0, 3.0, 0.0, 0.0], top_k=4, top_p=0.99) == {0, 1, 2, 3}


def test_a_tiny_top_p_keeps_the_best_token_alone() -> None:
    assert drawn([0.0, 1.0, 1.0], top_p=5e-324) == {1}


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    row = np.log([0.1, 0.5, 0.2, 0.06]).tolist()
    assert drawn(row, min_p=0.19) == {0, 1, 2}
    assert drawn(row, min_p=0.21) == {1, 2}
    assert drawn([0.0, 3.0, 3.0, 2.9], min_p=1.0) == {1, 2}
    assert drawn(row, min_p=1e-30) == {0, 1, 2, 3}


def test_a_repetition_penalty_counts_a_token_once_and_works_toward_less_on_both_signs() -> None:
    row = np.array([[3.0, 2.9, -1.0]], dtype=np.float32)
    twice = {"history": [0, 0, 0], "num_prompt": 3}
    assert sample_all(row, [greedy(repetition_penalty=1.01, **twice)]) == [0]
    assert sample_all(row, [greedy(repetition_penalty=1.1, **twice)]) == [1]
    below = np.array([[-1.0, -1.5]], dtype=np.float32)
    assert sample_all(below, [greedy(repetition_penalty=2.0, history=[0])]) == [1]


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    row = np.array([[3.0, 2.0]], dtype=np.float32)
    prompt = {"history": [0, 0, 0], "num_prompt": 3}
    output = {"history": [1, 0, 0, 0], "num_prompt": 1}
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert sample_all(row, [greedy(**{penalty: 2.0}, **prompt)]) == [0]
        assert sample_all(row, [greedy(**{penalty: 2.0}, **output)]) == [1]
    assert sample_all(row, [greedy(frequency_penalty=0.3, **output)]) == [0]
    assert sample_all(row, [greedy(frequency_penalty=0.4, **output)]) == [1]
    assert sample_all(row, [greedy(presence_penalty=0.4, **output)]) == [0]


def test_penalties_without_a_history_change_nothing() -> None:
    row = np.array([[3.0, 2.0]], dtype=np.float32)
    assert sample_all(row, [greedy(repetition_penalty=9.0, presence_penalty=2.0)]) == [0]


def test_a_bias_of_a_hundred_forces_a_token_and_its_opposite_forbids_it() -> None:
    row = np.array([[30.0, 2.0, -30.0]], dtype=np.float32)
    assert sample_all(row, [greedy(bias={2: 100.0})]) == [2]
    assert sample_all(row, [greedy(bias={0: -100.0})]) == [1]
    assert sample_all(row, [greedy(bias={0: -3.4e38, 1: -3.4e38})]) == [2]
    # All forbidden: the lowest id, and no failure.
    assert sample_all(row, [greedy(bias=dict.fromkeys(range(3), -3.4028235e38))]) == [0]
    assert drawn(row[0], adjustments=adjustments({0: -100.0, 1: -100.0})) == {2}


def test_bias_and_penalties_leave_log_probabilities_alone() -> None:
    row = np.array([[3.0, 2.0, 1.0]], dtype=np.float32)
    plain, changed = (
        run(row, [Asked(greedy(**parameters), num_logprobs=2)])[0]
        for parameters in ({}, {"bias": {2: 50.0}, "repetition_penalty": 2.0, "history": [0]})
    )
    assert (plain.token, changed.token) == (0, 2)
    assert changed.top == plain.top
    expected = np.log(np.exp(row[0]) / np.exp(row[0]).sum())
    assert plain.logprob == pytest.approx(expected[0], abs=1e-6)
    assert changed.logprob == pytest.approx(expected[2], abs=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 1029])
@pytest.mark.parametrize("vocab", [1030, 1088])
def test_a_row_that_is_not_finite_is_reported_and_not_sampled(bad, place: int, vocab: int) -> None:
    logits = np.zeros((2, vocab), dtype=np.float32)
    logits[:, 4] = 1
    logits[1, place] = bad
    for temperature in (0.0, 1.0):
        choice = Choice(temperature, 1e-4, 1, 0, 0)
        sound, failed, given_failed = run(
            logits, [Asked(choice, 0, 1), Asked(choice, 1, 2), Asked(choice, 1, 0, given_token=3)]
        )
        assert (sound.token, sound.is_finite) == (4, True)
        assert (failed.token, failed.is_finite, given_failed.is_finite) == (0, False, False)
        assert np.isnan([failed.logprob, given_failed.logprob]).all()
        assert np.isnan([value for _, value in failed.top]).all()


def test_what_lies_behind_the_vocabulary_in_a_row_is_never_read() -> None:
    for vocab in (1, 64, 100):
        logits = np.arange(vocab, dtype=np.float32)[None]
        for padding in (0, 1, 63, 200):
            (answer,) = run(logits, [Asked(Choice(0.9, 0.99, 3, 0, 0), 0, 4)], padding)
            assert answer == specified(logits, Asked(Choice(0.9, 0.99, 3, 0, 0), 0, 4))


@pytest.mark.wide
def test_draws_with_every_cut_follow_their_distribution() -> None:
    """Pearson's χ²; the keys are fixed, so it never flickers."""
    row = np.random.default_rng(11).standard_normal(30).astype(np.float32) * 1.5
    count, temperature = 30_000, 1.7
    choices = [
        Choice(temperature, 0.8, i * 977, i % 5, i // 5, top_k=20, min_p=0.1) for i in range(count)
    ]
    expected = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.argsort(-expected)
    expected[order[20:]] = 0
    running = np.cumsum(expected[order] / expected.sum())
    expected[order[int(np.searchsorted(running, 0.8)) + 1 :]] = 0
    expected[expected < 0.1] = 0
    expected *= count / expected.sum()
    counted = np.bincount(sample_all(row[None], choices), minlength=30)
    assert not counted[expected == 0].any()
    possible = expected > 0
    assert 3 < possible.sum() < 20
    chi_square = ((counted - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert abs(chi_square - freedom) < 3.5 * np.sqrt(2 * freedom)
