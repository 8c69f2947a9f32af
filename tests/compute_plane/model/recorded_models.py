"""A tiny model from files, what transformers says of it, and whether an executor says the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model.loader import LoadedModel
from tests.devices import Target
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


def with_keys(architecture: str, keys: dict[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    """Return what gives a GGUF file these keys of an architecture."""

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"{architecture}.{key}", value, kind)

    return change


def record(
    tiny: Any,
    folder: Path,
    made: Any,
    config: dict[str, Any],
    keys: dict[str, Any],
    vectors: dict[str, Any] | None = None,
    *,
    prepare: Callable[[dict[str, np.ndarray]], None] = lambda _: None,
    expert_type: GgmlType | None = None,
) -> Recorded:
    """Write a model as both kinds of files, and ask transformers.

    `config`: what its config.json has besides. `keys`, `vectors`: what the GGUF file has besides.
    `prepare`: changes weights, made small, before they are written. `expert_type`: of experts in
    the GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM

    for name, values in made.weights.items():
        if values.ndim > 1 and "embed" not in name:
            values *= np.float32(0.15)
    prepare(made.weights)
    directory = tiny.directory(folder / "hf", made, config=config)
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    file = tiny.gguf(
        folder / "m.gguf",
        made,
        GgmlType.F32,
        change=with_keys(made.in_gguf, keys),
        vectors=vectors,
        expert_type=expert_type,
    )
    found = Recorded(directory, file, [], [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more the time goes into waking them
    try:
        for prompt in PROMPTS:
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(NEW_TOKENS):
                    logits = theirs(torch.tensor([tokens])).logits[0]
                    tokens.append(int(logits[-1].argmax()))
            found.tokens.append(tokens)
            found.logits.append(logits[len(prompt) - 1 :].numpy())
    finally:
        torch.set_num_threads(threads)
    return found


def assert_same(recorded: Recorded, model: LoadedModel, target: Target) -> None:
    """Generate greedily, and compare tokens and logits."""
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
