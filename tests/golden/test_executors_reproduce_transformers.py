"""The embedded model on an executor against what `record.py` recorded from transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compute_plane.executor.interface import GPUExecutor
from compute_plane.model.loader import load_model
from compute_plane.model.source import DEFAULT
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32
from tests.golden.prompts import DATA

pytestmark = pytest.mark.model

NUM_BLOCKS, BLOCK_SIZE = 300, 16
CHUNK_TOKENS = 256
LEAST_MARGIN = 1e-3
GREEDY: dict[str, Any] = json.loads((DATA / "greedy.json").read_text(encoding="utf-8"))
PERPLEXITY: dict[str, Any] = json.loads((DATA / "perplexity.json").read_text(encoding="utf-8"))
RUNS: list[dict[str, Any]] = GREEDY["runs"]
ORDINARY = ("japanese",)
"""It runs in the ordinary tests. All twenty, the long one too, do so together through both planes
in tests/integration."""

ALONE = [
    pytest.param(run, id=run["name"], marks=[] if run["name"] in ORDINARY else pytest.mark.slow)
    for run in RUNS
]


@pytest.fixture(scope="module")
def executor(target: Target) -> Iterator[GPUExecutor]:
    model = load_model(DEFAULT)
    assert model.sha256 == GREEDY["model_sha256"] == PERPLEXITY["model_sha256"]
    with target.running(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as made:
        yield made


@pytest.fixture
def driver(executor: GPUExecutor) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def test_no_recorded_choice_is_a_near_tie() -> None:
    assert len(RUNS) == 20
    assert {run["name"] for run in RUNS} > set(ORDINARY)
    assert all(len(run["token_ids"]) == 64 for run in RUNS)
    assert min(run["min_margin"] for run in RUNS) > LEAST_MARGIN


@pytest.mark.parametrize("run", ALONE)
def test_a_prompt_alone_gives_the_recorded_tokens(driver: BatchDriver, run: dict[str, Any]) -> None:
    [tokens] = driver.generate([DrivenSequence(list(run["prompt_token_ids"]))], 64)
    assert tokens == run["token_ids"]


@pytest.mark.slow
def test_all_prompts_at_once_give_the_recorded_tokens(driver: BatchDriver) -> None:
    sequences = [DrivenSequence(list(run["prompt_token_ids"])) for run in RUNS]
    tokens = driver.generate(sequences, 64, chunk=CHUNK_TOKENS)
    assert {run["name"]: ids for run, ids in zip(RUNS, tokens, strict=True)} == {
        run["name"]: run["token_ids"] for run in RUNS
    }


@pytest.mark.slow  # through both planes it is asked for, and all of it compared, every time
def test_perplexity_of_the_fixed_text_is_within_a_tenth_of_a_percent(driver: BatchDriver) -> None:
    tokens: list[int] = PERPLEXITY["token_ids"]
    sequence = DrivenSequence(list(tokens))
    logprobs: list[np.ndarray] = []
    while sequence.num_computed < len(tokens):
        batch = driver.batch([sequence], CHUNK_TOKENS)
        start, end = sequence.num_computed, int(batch.seq_lens[0])
        targets = int32(tokens[start + 1 : end + 1])
        output = driver.executor.execute(
            replace(batch, prompt_logprob_rows=[0], prompt_logprob_targets=[targets])
        )
        logprobs.append(output.prompt_logprobs[0])
        sequence.num_computed = end
    mean_nll = -float(np.mean(np.concatenate(logprobs), dtype=np.float64))
    # exp(difference) is the ratio of the perplexities.
    assert np.exp(mean_nll - PERPLEXITY["mean_nll"]) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(np.concatenate(logprobs), PERPLEXITY["logprobs"], atol=2e-3)
