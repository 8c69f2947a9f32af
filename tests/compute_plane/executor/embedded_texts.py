"""Texts whose hidden states an executor gives, driven by hand: whole, in chunks, in company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from compute_plane.executor.interface import (
    EmbeddingPart,
    EmbeddingWant,
    ExecutionBatch,
    Float64Array,
    GPUExecutor,
)
from tests.golden.batch_driver import BatchDriver, DrivenSequence


def without_samples(batch: ExecutionBatch, rows: Sequence[int] = ()) -> ExecutionBatch:
    """Return a batch that samples some rows only."""
    kept = [k for k, row in enumerate(batch.sampled_rows.tolist()) if row in rows]
    return replace(
        batch,
        sampled_rows=batch.sampled_rows[kept],
        sampling=[batch.sampling[k] for k in kept],
    )


def embed(
    executor: GPUExecutor,
    texts: Sequence[Sequence[int]],
    part: EmbeddingPart,
    *,
    chunk: int | None = None,
    company: Sequence[Sequence[int]] = (),
    num_blocks: int = 60,
    block_size: int = 4,
) -> Float64Array:
    """Return the hidden states of each text, or their sums, [texts, hidden].

    `company`: texts computed beside them, of which tokens are sampled.
    """
    driver = BatchDriver(executor, num_blocks=num_blocks, block_size=block_size)
    sequences = [DrivenSequence(list(text)) for text in texts]
    others = [DrivenSequence(list(text)) for text in company]
    found: list[Float64Array] = [np.zeros(0)] * len(texts)
    sums: list[list[Float64Array]] = [[] for _ in texts]
    while running := [s for s in sequences if s.num_computed < len(s.tokens)]:
        everyone = [*others, *running]
        batch = driver.batch(everyone, chunk)
        batch = without_samples(batch, range(len(others)))
        wants = [EmbeddingWant(len(others) + i, part) for i in range(len(running))]
        output = executor.execute(replace(batch, embeddings=wants))
        assert output.embeddings is not None
        assert not output.failed_rows
        for sequence, values in zip(running, output.embeddings, strict=True):
            number = sequences.index(sequence)
            found[number] = values
            sums[number].append(values)
        driver.commit(everyone, batch, output)
    if part is EmbeddingPart.SUM:
        found = [np.add.reduce(parts) for parts in sums]
    return np.stack(found)
