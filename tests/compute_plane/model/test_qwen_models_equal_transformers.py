"""Tiny Qwen2 and Qwen3 models from files: every executor's logits and texts are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model.loader import LoadedModel, load_model
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

PROMPTS = [[5, 17, 40, 41, 42, 9, 250, 77, 3, 88, 120, 121], [200, 8, 199]]
NEW_TOKENS = 20
NUM_BLOCKS, BLOCK_SIZE = 24, 16


@dataclass(frozen=True)
class Recorded:
    """What transformers says of `PROMPTS`: the greedy tokens, and the logits of each."""

    directory: Path
    gguf: Path
    tokens: list[list[int]]
    logits: list[np.ndarray]


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp(request.param)
    made = tiny.model(architecture=request.param, tied=request.param == "qwen2")
    for name, values in made.weights.items():
        if values.ndim > 1 and "embed" not in name:
            values *= np.float32(0.15)
    directory = tiny.directory(folder / "hf", made)
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    found = Recorded(directory, tiny.gguf(folder / "m.gguf", made, GgmlType.F32), [], [])
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                logits = theirs(torch.tensor([tokens])).logits[0]
                tokens.append(int(logits[-1].argmax()))
        found.tokens.append(tokens)
        found.logits.append(logits[len(prompt) - 1 :].numpy())
    return found


@pytest.fixture(params=["directory", "gguf"])
def model(request, recorded) -> Iterator[LoadedModel]:
    return load_model(str(getattr(recorded, request.param)))


@pytest.mark.parametrize("target", [Target("cpu", "cpu"), STAND_IN], ids=["cpu", "cuda"])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, model: LoadedModel, target: Target
) -> None:
    with target.running(
        model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, keep_logits=True
    ) as executor:
        driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        sequences = [DrivenSequence(list(prompt)) for prompt in PROMPTS]
        for step in range(NEW_TOKENS):
            batch = driver.batch(sequences)
            output = executor.execute(batch)
            for row, logits in enumerate(output.logits):
                expected = recorded.logits[row][step]
                np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
            driver.commit(sequences, batch, output)
    assert [sequence.tokens for sequence in sequences] == recorded.tokens
