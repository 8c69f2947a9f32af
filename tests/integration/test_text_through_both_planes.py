"""The recorded prompts as a client sends them: text in, text out, two processes in between."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from control_plane.core.generation_params import GenerationParams
from hetero_infer.client import Client, Delta, Finished, Started
from tests.golden.prompts import DATA
from tests.integration.conftest import Deployment

pytestmark = pytest.mark.model

RUNS: list[dict[str, Any]] = json.loads((DATA / "greedy.json").read_text(encoding="utf-8"))["runs"]


def generate(
    client: Client, prompt: str, params: GenerationParams
) -> tuple[Started, str, list[int], Finished]:
    started, *deltas, finished = client.stream(prompt, params)
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert all(isinstance(delta, Delta) for delta in deltas)
    token_ids = [token for delta in deltas for token in delta.token_ids]
    return started, "".join(delta.text for delta in deltas), token_ids, finished


@pytest.mark.parametrize(
    "num_tokens",
    [4, pytest.param(16, marks=pytest.mark.wide), pytest.param(64, marks=pytest.mark.slow)],
)
def test_all_recorded_prompts_at_once_give_the_recorded_tokens(
    exact_deployment: Deployment, num_tokens: int
) -> None:
    params = GenerationParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    with (
        Client(exact_deployment.control) as client,
        ThreadPoolExecutor(len(RUNS)) as pool,
    ):
        answers = list(pool.map(lambda run: generate(client, run["prompt"], params), RUNS))
    for run, (started, _, token_ids, finished) in zip(RUNS, answers, strict=True):
        assert started.prompt_tokens == len(run["prompt_token_ids"]), run["name"]
        assert token_ids == run["token_ids"][:num_tokens], run["name"]
        assert finished.finish_reason == "length"
        assert finished.completion_tokens == num_tokens


def test_a_text_cut_anywhere_has_whole_characters_only(exact_deployment: Deployment) -> None:
    cuts = range(1, 9)
    with Client(exact_deployment.control) as client, ThreadPoolExecutor(len(cuts)) as pool:

        def cut(max_tokens: int) -> tuple[Started, str, list[int], Finished]:
            params = GenerationParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            return generate(client, "你好,世界!", params)

        answers = list(pool.map(cut, cuts))
    assert [len(token_ids) for _, _, token_ids, _ in answers] == list(cuts)
    assert not [text for _, text, _, _ in answers if "�" in text]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    exact_deployment: Deployment,
) -> None:
    with Client(exact_deployment.control) as client:
        texts = [
            generate(client, "Once upon a time", GenerationParams(max_tokens=24, seed=seed))[1]
            for seed in (7, 7, 8)
        ]
    assert texts[0] == texts[1] != texts[2]
