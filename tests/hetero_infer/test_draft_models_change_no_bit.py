"""With a draft model and without: every token, text, log-probability, end and count is the same.

The embedded model drafts for itself: greedily it guesses right nearly always.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_infer import EngineConfig, GenerationParams
from planes.errors import ConfigError
from tests.hetero_infer.test_drafts_change_no_bit import (
    EMBEDDED,
    GREEDY,
    IN_FORM,
    REQUESTS,
    answers,
)

DRAFTING = replace(
    EMBEDDED,
    draft_model="default",
    draft_p_min=0.0,
    speculative_tokens=7,
    prompt_lookup_min=64,
)
"""Texts that repeat themselves so long are rare: what is kept was the draft model's."""


@pytest.mark.model
def test_greedy_and_drawn_texts_are_the_same_bits_and_most_tokens_were_guessed() -> None:
    requests = [
        ("The capital of France is", replace(GREEDY, max_tokens=40, num_logprobs=1)),
        ("Once upon a time", GenerationParams(max_tokens=24, temperature=0.8, seed=3)),
    ]
    plain, none_kept = answers(EMBEDDED, requests, together=False)
    assert none_kept == 0
    drafted, num_kept = answers(DRAFTING, requests, together=False)
    assert drafted == plain
    assert num_kept > 20


@pytest.mark.wide
@pytest.mark.model
@pytest.mark.parametrize("together", [True, False])
def test_whatever_is_asked_answers_are_the_same_bits(together: bool) -> None:
    requests = [*REQUESTS, *IN_FORM]
    plain, _ = answers(EMBEDDED, requests, together=True)
    drafting = replace(DRAFTING, grammar_drafts=True, prompt_lookup_min=3)
    drafted, num_kept = answers(drafting, requests, together=together)
    assert drafted == plain
    assert num_kept > (20 if together else 200)


@pytest.mark.wide
@pytest.mark.model
def test_a_full_pool_and_blocks_that_are_swapped_change_nothing() -> None:
    """Two sequences that need more blocks than there are: blocks go from one to the other."""
    requests = [
        (f"{number} {prompt}", replace(params, max_tokens=90))
        for number in range(3)
        for prompt, params in REQUESTS[2:4]
    ]
    config = replace(EMBEDDED, max_num_blocks=24, max_model_len=260, max_batch_size=3)
    plain, _ = answers(config, requests, together=True)
    for swap_space in (0.0, 0.01):
        drafting = replace(
            config,
            draft_model="default",
            draft_p_min=0.0,
            speculative_tokens=3,
            swap_space=swap_space,
        )
        drafted, num_kept = answers(drafting, requests, together=True)
        assert drafted == plain
        assert num_kept > 20


@pytest.mark.slow
@pytest.mark.model
def test_a_plane_that_launches_steps_ahead_has_a_draft_model_too() -> None:
    """The CUDA executor on torch's CPU device: of greedy answers the tokens are the same."""
    stand_in = replace(EMBEDDED, executor="cuda", device="cpu")
    requests = [("The capital of France is", replace(GREEDY, max_tokens=28))]
    plain, none_kept = answers(stand_in, requests, together=True)
    assert none_kept == 0
    drafting = replace(
        stand_in,
        draft_model="default",
        draft_p_min=0.0,
        speculative_tokens=5,
        prompt_lookup_min=64,
    )
    drafted, num_kept = answers(drafting, requests, together=True)
    texts = [[sample.output_tokens for sample in samples] for samples, *_ in drafted]
    assert texts == [[sample.output_tokens for sample in samples] for samples, *_ in plain]
    assert num_kept > 5


def test_an_engine_without_a_model_to_guess_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        EngineConfig(executor="simulated", draft_model="default").validate()
