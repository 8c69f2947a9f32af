"""Tiny random models: logits of the CPU executor against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest

from compute_plane.model.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("architecture", "scaling", "tied"),
    [
        ("llama", None, False),
        ("llama", None, True),
        ("llama", Llama3Scaling(8.0, 1.0, 4.0, 64), False),
        ("llama", LinearScaling(4.0), False),
        ("qwen2", None, True),
        ("qwen2", YarnScaling(4.0, 24, 1.14), True),
        ("qwen3", None, False),
    ],
    ids=["plain", "tied", "llama3", "linear", "qwen2", "yarn", "qwen3"],
)
def test_the_logits_of_every_position_equal_those_of_transformers(
    architecture, scaling, tied
) -> None:
    import torch

    from tests.compute_plane.executor.llama_of_transformers import transformers_model

    spec = tiny_spec(scaling, tied=tied, architecture=architecture)
    weights = tiny_weights(spec)
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, 90)
    with torch.inference_mode():
        expected = transformers_model(spec, weights)(torch.from_numpy(tokens)[None]).logits[0]
    pool = pool_for(spec, 24, 5)
    with tiny_executor(spec, weights, pool, keep_logits=True) as executor:
        driver = BatchDriver(executor, num_blocks=24, block_size=5)
        sequence = DrivenSequence([int(token) for token in tokens[:41]])
        for known in range(41, 91):  # a prefill of 41 tokens, then a decode row a token
            output = executor.execute(driver.batch([sequence]))
            assert output.logits is not None
            np.testing.assert_allclose(
                output.logits[0], expected[known - 1].numpy(), rtol=2e-5, atol=2e-5
            )
            sequence.num_computed = known
            sequence.tokens.append(int(tokens[known % 90]))
