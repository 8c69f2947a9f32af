"""The embedded model in float32 against what `tests.golden.record` recorded from transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.drivers import CpuDriver, Driver
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.cuda.weights import DeviceWeights
from compute_plane.model.loader import load_model
from compute_plane.model.source import DEFAULT
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.cuda.torch_executors import RecordingDriver
from tests.golden.batch_driver import BatchDriver, DrivenSequence
from tests.golden.prompts import DATA

pytestmark = pytest.mark.model

NUM_BLOCKS, BLOCK_SIZE = 300, 16
RUNS: list[dict[str, Any]] = json.loads((DATA / "greedy.json").read_text("utf-8"))["runs"]
SPREAD = ("greeting", "chinese")
"""These run in the ordinary tests, as far as `FEW_TOKENS`."""
FEW_TOKENS = 24

MakeDriver = Callable[[Driver], BatchDriver]


@pytest.fixture(scope="module")
def model() -> tuple[ModelSpec, DeviceWeights]:
    loaded = load_model(DEFAULT)
    plan = plan_weights(loaded.spec, loaded.source, "float32", "float32")
    return loaded.spec, plan.place(torch.device("cpu"))


@pytest.fixture(scope="module")
def made(model: tuple[ModelSpec, DeviceWeights]) -> MakeDriver:
    spec, weights = model

    def make(device: Driver) -> BatchDriver:
        pools = BlockPools(
            spec, device, dtype=torch.float32, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
        )
        executor = CudaExecutor(spec, weights, pools, ReferenceOperations(), device)
        return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)

    return make


def of(names: tuple[str, ...]) -> tuple[list[DrivenSequence], dict[str, list[int]]]:
    """Return sequences and recorded tokens of the prompts with these names."""
    runs = [run for run in RUNS if run["name"] in names]
    sequences = [DrivenSequence(list(run["prompt_token_ids"])) for run in runs]
    return sequences, {run["name"]: run["token_ids"] for run in runs}


@pytest.mark.slow
def test_prompts_together_give_the_recorded_tokens_through_graphs(made: MakeDriver) -> None:
    device = RecordingDriver()
    driver = made(device)
    driver.executor.capture_decode_graph(2)
    sequences, recorded = of(SPREAD)
    tokens = driver.generate(sequences, FEW_TOKENS)
    assert tokens == [ids[:FEW_TOKENS] for ids in recorded.values()]
    assert device.take_calls().count("replay") == FEW_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [run["name"] for run in RUNS])
def test_a_prompt_alone_gives_the_recorded_tokens(made: MakeDriver, name: str) -> None:
    sequences, recorded = of((name,))
    assert made(CpuDriver()).generate(sequences, 64, chunk=256) == [recorded[name]]


@pytest.mark.slow
def test_all_prompts_at_once_give_the_recorded_tokens(made: MakeDriver) -> None:
    sequences, recorded = of(tuple(run["name"] for run in RUNS))
    assert made(CpuDriver()).generate(sequences, 64, chunk=256) == list(recorded.values())


@pytest.mark.wide
def test_the_log_probabilities_of_a_text_are_the_recorded_ones(made: MakeDriver) -> None:
    perplexity = json.loads((DATA / "perplexity.json").read_text("utf-8"))
    tokens = np.array(perplexity["token_ids"][:97], dtype=np.int32)
    driver = made(CpuDriver())
    batch = driver.batch([DrivenSequence(tokens[:-1].tolist())])
    batch = replace(batch, prompt_logprob_rows=[0], prompt_logprob_targets=[tokens[1:]])
    [logprobs] = driver.executor.execute(batch).prompt_logprobs
    np.testing.assert_allclose(logprobs, perplexity["logprobs"][:96], atol=2e-3)
