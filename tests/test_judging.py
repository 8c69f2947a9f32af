"""The rule by which tokens of other numerics are judged: right ones pass, wrong ones do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.generation_params import GenerationParams
from kernels.reference.sampling import Choice, choose
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import STAND_IN
from tests.golden.batch_driver import BatchDriver, DrivenSequence
from tests.judging import REFERENCE, Judge, Said, could_choose

V = 60
choices = st.builds(
    Choice,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.1]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 3),
    position=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 5, 40, 200]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)


def logits(seed: int) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal(V)).astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(choice=choices, seed=st.integers(0, 999), tolerance=st.sampled_from([0.0, 0.01, 0.25, 1.0]))
def test_what_is_chosen_from_logits_that_are_off_by_the_tolerance_could_be(choice, seed, tolerance):
    exact = logits(seed)
    off = np.random.default_rng(seed + 1).uniform(-1, 1, V) * tolerance * 0.999
    token = choose((exact + off).astype(np.float32), choice)
    assert token is not None
    assert could_choose(exact, choice, token, tolerance + 1e-6)


@settings(max_examples=100, deadline=None)
@given(choice=choices, seed=st.integers(0, 999))
def test_without_a_tolerance_only_the_token_that_is_chosen_could_be(choice, seed):
    exact = logits(seed)
    possible = [token for token in range(V) if could_choose(exact, choice, token, 0.0)]
    assert possible == [choose(exact, choice)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_other_logits_lead_to_is_mostly_noticed(temperature):
    wrong = 0
    for seed in range(50):
        choice = Choice(temperature, 0.9, seed, 0, seed)
        token = choose(logits(seed + 1000), choice)
        assert token is not None
        wrong += not could_choose(logits(seed), choice, token, 0.25)
    assert wrong > 35


def test_a_token_that_is_lost_doubled_or_changed_is_found():
    spec = tiny_spec()
    model = model_in_memory(spec, tiny_weights(spec))
    prompt, params = [5, 6, 7, 8], GenerationParams(temperature=0.0)
    with REFERENCE.running(model, num_blocks=8, block_size=4) as executor:
        driver = BatchDriver(executor, num_blocks=8, block_size=4)
        [tokens] = driver.generate([DrivenSequence(list(prompt))], 6)
    judge = Judge(STAND_IN, model)
    judge.check([Said(prompt, params, tokens)], [[*tokens, 1]])
    for k in range(5):
        for wrong in (
            [*tokens[:k], *tokens[k + 1 :]],
            [*tokens[: k + 1], *tokens[k:]],
            [*tokens[:k], (tokens[k] + 1) % spec.vocab_size, *tokens[k + 1 :]],
        ):
            with pytest.raises(AssertionError, match="could not follow"):
                judge.check([Said(prompt, params, wrong)], [tokens])
    judge.close()


@pytest.mark.wide
def test_where_bits_are_kept_tokens_are_equal_and_nothing_else_will_do():
    said = Said([5], GenerationParams(temperature=0.0), [1, 2])
    Judge(REFERENCE).check([said], [[1, 2]])
    with pytest.raises(AssertionError):
        Judge(REFERENCE).check([said], [[1, 3]])
