"""Perplexity of the embedded model, per format, beside float32 as transformers computed it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.source import DEFAULT
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32
from tests.golden.prompts import DATA

pytestmark = pytest.mark.model

BLOCK_SIZE, CHUNK_TOKENS = 16, 256
PERPLEXITY: dict[str, Any] = json.loads((DATA / "perplexity.json").read_text(encoding="utf-8"))
TOKENS: list[int] = PERPLEXITY["token_ids"][:1024]
MEAN_NLL = -float(np.mean(PERPLEXITY["logprobs"][: len(TOKENS) - 1]))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(DEFAULT)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "is_prompt", "allowed"),
    [
        ("auto", "bfloat16", False, 0.01),
        pytest.param("auto", "int8", False, 0.01, marks=pytest.mark.slow),
        pytest.param("auto", "float8", False, 0.02, marks=pytest.mark.slow),
        ("auto", "bfloat16", True, 0.01),
        pytest.param("bfloat16", "bfloat16", False, 0.002, marks=pytest.mark.slow),
    ],
)
def test_perplexity_is_within_what_the_format_may_lose(
    target: Target, model: LoadedModel, dtype: str, kv_dtype: str, is_prompt: bool, allowed: float
) -> None:
    """The text counts as generated, or as a prompt: that may take other products."""
    num_blocks = -(-len(TOKENS) // BLOCK_SIZE)
    logprobs = []
    with target.running(
        model, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, kv_cache_dtype=kv_dtype
    ) as executor:
        driver = BatchDriver(executor, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        sequence = DrivenSequence(list(TOKENS), num_prompt=len(TOKENS) if is_prompt else 1)
        while sequence.num_computed < len(TOKENS):
            batch = driver.batch([sequence], CHUNK_TOKENS)
            start, end = sequence.num_computed, int(batch.seq_lens[0])
            targets = int32(TOKENS[start + 1 : end + 1])
            asked = replace(batch, prompt_logprob_rows=[0], prompt_logprob_targets=[targets])
            logprobs.append(executor.execute(asked).prompt_logprobs[0])
            sequence.num_computed = end
    mean_nll = -float(np.mean(np.concatenate(logprobs), dtype=np.float64))
    # exp(difference) is the ratio of the perplexities.
    assert np.exp(mean_nll - MEAN_NLL) == pytest.approx(1, abs=allowed)
