"""Rows behind one prefix, as its blocks are shared, compute it together; nobody can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compute_plane.cpu import executor as cpu_executor
from kernels.cpu.attention_plan import AttentionPlan, plan_attention
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_latents,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

NUM_BLOCKS, BLOCK_SIZE = 400, 4
SEGMENT = 64 * BLOCK_SIZE
"""Tokens of a segment where each block is a sub-block."""
SPEC = replace(tiny_spec(), context_length=2048)
MODELS = {
    "llama": SPEC,
    "windows": replace(
        SPEC, architecture="gemma3", window=300, layers_with_window=frozenset([0]),
        local_rope_theta=500.0, layers_with_local_rope=frozenset([0]),
    ),
    "latents": replace(with_latents(SPEC), context_length=2048),
}  # fmt: skip


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[AttentionPlan]:
    """The plans of all pieces that go the ordinary way."""
    made: list[AttentionPlan] = []

    def plan(*arguments: Any) -> AttentionPlan:
        made.append(plan_attention(*arguments))
        return made[-1]

    monkeypatch.setattr(cpu_executor, "plan_attention", plan)
    return made


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_behind_one_prefix_have_the_logits_they_have_alone(
    plans: list[AttentionPlan], model: str, kv_dtype: str
) -> None:
    spec = MODELS[model]
    random = np.random.default_rng(1)

    def drawn(count: int) -> list[int]:
        tokens: list[int] = random.integers(0, spec.vocab_size, count).tolist()
        return tokens

    pool = pool_for(spec, NUM_BLOCKS, BLOCK_SIZE, kv_dtype)
    with tiny_executor(spec, tiny_weights(spec), pool, keep_logits=True) as executor:
        driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        first = DrivenSequence(drawn(2 * SEGMENT + 5))
        driver.generate([first], 1)
        rows = [first]
        for common, own in ((2 * SEGMENT, 9), (SEGMENT, 300), (SEGMENT, 1), (40, 280)):
            rows.append(
                DrivenSequence(
                    first.tokens[:common] + drawn(own),
                    num_computed=common,
                    blocks=first.blocks[: common // BLOCK_SIZE],
                )
            )
        driver.generate(rows[1:], 1, chunk=64)
        for _ in range(5):
            together = driver.batch(rows)
            output = executor.execute(together)
            assert output.logits is not None
            assert [count for count in plans[-1].items[:, 1].tolist() if count > 1] == [4, 2]
            for row, logits in zip(rows, output.logits, strict=True):
                alone = executor.execute(driver.batch([row])).logits
                assert alone is not None
                np.testing.assert_array_equal(alone[0], logits)
            driver.commit(rows, together, output)
