"""Structured answers are the same with drafts and without, whatever form and parameters are drawn.

Once for constraints alone, over bytes, where every mask is compared; and once for whole engines
whose blocks run short, beside free requests, against the same requests one token a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from control_plane.core.constraint import Constraint
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request
from control_plane.structured.grammars import Grammars
from control_plane.text.simple_tokenizer import EOS_TOKEN_ID, SimpleTokenizer
from hetero_infer import EngineConfig, InferenceEngine
from planes.errors import ValidationError
from tests.properties.drawn_forms import form

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(SimpleTokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_TOKEN_ID,))


def run_constraints(grammars: Grammars, seed: int) -> int:
    """Give one text to a constraint token by token, and as drafts to another; those kept."""
    draw = Random(seed)
    params = GenerationParams(structured_outputs=form(draw), ignore_eos=draw.random() < 0.3)
    num_kept = 0
    for _ in range(3):  # with the habits of those before
        try:
            plain, made = (
                grammars.constrain(Request(1, [1], params, cache_salt=salt)).result(timeout=60)[0]
                for salt in ("plain", "made")
            )
        except ValidationError:
            return num_kept
        num_tokens = 0
        while not plain.is_complete and plain.error is None and num_tokens < 80:
            assert made.allowed_tokens == plain.allowed_tokens, seed
            taken: list[int] = []
            for draft in made.draft(draw.randint(1, 7)):
                if draft.token_id != (token := drawn(plain, draw)):
                    break
                take(plain, token)
                assert plain.allowed_tokens == draft.allowed_tokens, seed
                assert (plain.is_complete, plain.error) == (False, None), seed
                taken.append(token)
            num_kept += len(taken)
            token = drawn(plain, draw)
            take(plain, token)
            take(made, *taken, token)
            assert (made.is_complete, made.error) == (plain.is_complete, plain.error), seed
            num_tokens += len(taken) + 1
    return num_kept


def take(made: Constraint, *tokens: int) -> None:
    made.constrainer.advance([(made, tokens)])


def drawn(made: Constraint, draw: Random) -> int:
    """A token that may come and ends nothing; mostly the same one in the same place."""
    bits = int.from_bytes(made.allowed_tokens, "little") & ~(1 << EOS_TOKEN_ID)
    allowed = [token for token in range(VOCAB_SIZE) if bits >> token & 1]
    return allowed[len(allowed) * 7 // 11] if draw.random() < 0.7 else draw.choice(allowed)


@pytest.mark.wide
def test_who_drafts_a_drawn_form_allows_what_one_allows_who_does_not(grammars: Grammars) -> None:
    assert sum(run_constraints(grammars, seed) for seed in range(40)) > 500


@pytest.mark.slow
def test_who_drafts_any_of_thousands_of_forms_allows_the_same(grammars: Grammars) -> None:
    for seed in range(1000, 4000):
        run_constraints(grammars, seed)


SMALL = EngineConfig(
    executor="simulated", block_size=4, max_num_blocks=64, max_batch_size=8, max_model_len=140
)


@contextmanager
def pair(config: EngineConfig) -> Iterator[tuple[InferenceEngine, InferenceEngine]]:
    """Two engines, of which the second has drafts."""
    with (
        InferenceEngine(replace(config, grammar_drafts=False)) as plain,
        InferenceEngine(config) as drafting,
    ):
        yield plain, drafting
        assert plain.get_metrics().num_drafts == 0
        assert drafting.get_metrics().num_kept_drafts > 0


def drawn_params(draw: Random) -> GenerationParams:
    def maybe(chance: float, **given: Any) -> dict[str, Any]:
        return given if draw.random() < chance else {}

    return GenerationParams(
        max_tokens=draw.choice([1, 2, 5, 17, 40, 70]),
        temperature=draw.choice([0.0, 0.6, 1.0, 1.7]),
        seed=draw.getrandbits(40),
        **maybe(0.8, structured_outputs=form(draw)),
        **maybe(0.3, top_p=draw.choice([0.3, 1.0])),
        **maybe(0.2, top_k=draw.choice([1, 3, 50])),
        **maybe(0.2, min_p=0.05),
        **maybe(0.3, repetition_penalty=draw.choice([0.8, 1.3])),
        **maybe(0.3, frequency_penalty=draw.choice([-0.5, 1.9])),
        **maybe(0.3, logit_bias={draw.randrange(256): draw.choice([-100.0, 5.0, 30.0])}),
        **maybe(0.4, num_logprobs=draw.choice([0, 2])),
        **maybe(0.15, num_prompt_logprobs=1),
        **maybe(0.3, n=draw.choice([2, 3])),
        **maybe(0.25, ignore_eos=True),
        **maybe(0.3, stop=tuple(draw.sample(['"', "}", "e", ": ", "a", '":'], 2))),
        **maybe(0.2, stop_token_ids=tuple(draw.sample(range(256), 3))),
        **maybe(0.4, include_stop=True),
    )


def answers(engine: InferenceEngine, requests: list[GenerationParams]) -> list[Any]:
    """What is seen of each; all run together."""
    ids: list[int | str] = []
    for params in requests:
        try:
            ids.append(engine.submit_request("the the {}", params))
        except ValidationError as refusal:
            ids.append(str(refusal))
    found = {result.request_id: result for result in engine.run()}
    assert engine.get_memory_stats().used_blocks == 0
    return [
        one
        if isinstance(one, str)
        else (found[one].samples, found[one].prompt_logprobs, found[one].error)
        for one in ids
    ]


def run_engines(config: EngineConfig, seed: int, num_rounds: int) -> None:
    draw = Random(seed)
    with pair(config) as (plain, drafting):
        for _ in range(num_rounds):
            requests = [drawn_params(draw) for _ in range(draw.randint(2, 9))]
            expected = answers(plain, requests)
            order = draw.sample(range(len(requests)), len(requests))
            found = answers(drafting, [requests[index] for index in order])
            assert found == [expected[index] for index in order], (seed, requests)


@pytest.mark.wide
def test_whatever_is_asked_of_an_engine_answers_are_the_same_with_drafts() -> None:
    run_engines(replace(SMALL, speculative_tokens=2), seed=1, num_rounds=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_whatever_is_asked_of_any_engine_answers_are_the_same_with_drafts(seed: int) -> None:
    draw = Random(seed)
    config = replace(
        SMALL,
        block_size=draw.choice([2, 8, 16]),
        max_num_blocks=draw.choice([80, 160]),
        max_batch_size=draw.choice([4, 8, 32]),
        max_num_seqs=draw.choice([3, 64]),
        prefix_cache=draw.random() < 0.6,
        speculative_tokens=draw.choice([0, 3, 7]),
        swap_space=draw.choice([0.0, 0.01]),
    )
    run_engines(config, seed, num_rounds=25)
