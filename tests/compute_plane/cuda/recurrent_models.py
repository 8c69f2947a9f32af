"""Tiny models in which layers that keep states of sequences and others take turns, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from compute_plane.executor.interface import ExecutionBatch, GPUExecutor
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.spec import Mixture
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SIZES = DeltaNet(2, 4, 32, 64, 4, frozenset({0, 2}))
SPEC = replace(tiny_spec(), num_layers=4, architecture="qwen35", delta_net=SIZES)
NUM_BLOCKS, BLOCK_SIZE = 60, 4
MIXTURE = Mixture(5, 2, shared_size=48, gates_shared=True)
TILED = replace(SPEC, delta_net=replace(SIZES, value_heads_tiled=True))
SPECS = {
    "Qwen3.5": SPEC,
    "Qwen3.5 as GGUF files have it": TILED,
    "Qwen3-Next": replace(SPEC, architecture="qwen3next", mixture=MIXTURE),
}
PROMPTS: Sequence[Sequence[int]] = (range(3, 14), [20], [30, 31, 32], range(40, 47))


def driven(executor: GPUExecutor, *, seed: int = 0) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seed=seed)


def sequences(prompts: Sequence[Sequence[int]] = PROMPTS) -> list[DrivenSequence]:
    return [DrivenSequence(list(prompt)) for prompt in prompts]


def logits_behind(
    executor: GPUExecutor, texts: Sequence[Sequence[int]], chunks: Sequence[int]
) -> list[np.ndarray]:
    """Return the logits behind the last token of each text, and how many it had, step by step.

    Every step takes `chunks[i]` tokens of each text at most, the last one as many as are left.
    """
    driver, rows = driven(executor), sequences(texts)
    found: dict[int, np.ndarray] = {}
    chunk = iter(chunks)
    while running := [row for row in rows if row.num_computed < len(row.tokens)]:
        batch = driver.batch(running, next(chunk, None))
        output = executor.execute(batch)
        assert not output.failed_rows
        assert output.logits is not None
        for row, end in zip(running, batch.seq_lens, strict=True):
            row.num_computed = int(end)
        for row, logits in zip(batch.sampled_rows, output.logits, strict=True):
            found[rows.index(running[row])] = logits
    return [found[index] for index in range(len(rows))]


def shuffled(batch: ExecutionBatch, order: Sequence[int]) -> ExecutionBatch:
    """Return a batch with its rows in another order."""
    ends = np.cumsum(batch.query_lens)
    tokens = np.concatenate([np.arange(ends[r] - batch.query_lens[r], ends[r]) for r in order])
    places = np.argsort(order)
    return replace(
        batch,
        **{name: getattr(batch, name)[tokens] for name in ("input_tokens", "positions")},
        **{
            name: getattr(batch, name)[list(order)]
            for name in (
                "seq_lens", "block_tables", "is_prefill", "prompt_lens", "query_lens", "states",
            )
        },
        sampled_rows=places[batch.sampled_rows].astype(np.int32),
    )  # fmt: skip
