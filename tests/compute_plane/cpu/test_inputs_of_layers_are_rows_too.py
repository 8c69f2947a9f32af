"""Inputs of layers that are wider than all else a layer has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.model import layer_inputs_layout, layout
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_gemma4,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

NUM_TOKENS = 500


@pytest.mark.parametrize("size", [32, 512])
def test_a_long_prompt_is_the_same_whole_and_in_small_chunks(size: int) -> None:
    """Rows of activations have room for them: a whole piece fills all of its rows."""
    spec = replace(with_gemma4(tiny_spec(quantisable=True)), layer_input_size=size)
    formats = {
        layout.layer_tensor(layer, layer_inputs_layout.OUTPUT): TensorFormat.Q8_0
        for layer in range(spec.num_layers)
    }
    prompt = np.random.default_rng(2).integers(0, spec.vocab_size, NUM_TOKENS).tolist()
    logits = []
    for chunk in (7, None):
        pool = pool_for(spec, 260, 4)
        executor = tiny_executor(spec, tiny_weights(spec), pool, keep_logits=True, formats=formats)
        with executor:
            driver = BatchDriver(executor, num_blocks=260, block_size=4)
            sequence = DrivenSequence([*prompt])
            while sequence.num_computed < NUM_TOKENS:
                batch = driver.batch([sequence], chunk)
                result = executor.execute(batch)
                driver.commit([sequence], batch, result)
            assert not len(result.failed_rows)
            logits.append(result.logits[0].copy())
    np.testing.assert_array_equal(*logits)
