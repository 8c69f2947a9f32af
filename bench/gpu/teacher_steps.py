"""Steps that put fixed texts through an executor, whatever it samples, and the logits they give.

Prompts of several lengths in chunks, so that one step mixes decode rows and a prompt's rest; then
steps in which all rows decode, which a graph with a row of padding holds, then one row alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    GPUExecutor,
    LaunchedStep,
    PipelinedExecutor,
    SamplingRow,
)
from compute_plane.model.spec import ModelSpec

PROMPTS: Final = (5, 17, 40)
"""Tokens of each."""
CHUNK: Final = 24
TOGETHER: Final = 16
"""Steps in which all rows decode."""
ALONE: Final = 3
"""Steps behind them, of the second row."""
BLOCK_SIZE: Final = 16

Span = tuple[int, int, int]
"""A row, and from which to which of its tokens it is computed."""


def num_blocks() -> int:
    """Return the blocks of a pool that holds all rows."""
    return len(PROMPTS) * _blocks_of_row()


def batches(spec: ModelSpec) -> list[ExecutionBatch]:
    """Return the steps, in their order."""
    random = np.random.default_rng(1)
    texts = random.integers(0, spec.vocab_size, (len(PROMPTS), _longest()), dtype=np.int32)
    return [_batch(spec, texts, spans) for spans in _spans()]


def logits_of(executor: GPUExecutor, steps: list[ExecutionBatch]) -> list[Float32Array]:
    """Return the logits of each step's sampled rows, [K, V].

    Steps are launched as a plane launches them, the next one while one is under way, where the
    executor does that. Raises RuntimeError for a row that has failed.
    """
    if not isinstance(executor, PipelinedExecutor):
        return [_logits(executor.execute(step)) for step in steps]
    found: list[Float32Array] = []
    under_way: LaunchedStep | None = None
    for step in steps:
        launched = executor.launch(step)
        if under_way is not None:
            found.append(_logits(under_way.answer()))
        under_way = launched
    if under_way is not None:
        found.append(_logits(under_way.answer()))
    return found


def _logits(output: ExecutionOutput) -> Float32Array:
    if output.failed_rows:
        raise RuntimeError(f"rows {sorted(output.failed_rows)} failed")
    assert output.logits is not None
    return output.logits.copy()


def _longest() -> int:
    return max(PROMPTS) + TOGETHER + ALONE + 1


def _blocks_of_row() -> int:
    return -(-_longest() // BLOCK_SIZE)


def _spans() -> list[list[Span]]:
    """Return what each step computes."""
    ends = [0] * len(PROMPTS)
    steps = []

    def step(rows: range | list[int]) -> None:
        spans = []
        for row in rows:
            left = PROMPTS[row] - ends[row]
            end = ends[row] + (min(left, CHUNK) if left > 0 else 1)
            spans.append((row, ends[row], end))
            ends[row] = end
        steps.append(spans)

    every = range(len(PROMPTS))
    while any(end < prompt for end, prompt in zip(ends, PROMPTS, strict=True)):
        step(every)
    for _ in range(TOGETHER):
        step(every)
    for _ in range(ALONE):
        step([1])
    return steps


def _batch(spec: ModelSpec, texts: np.ndarray, spans: list[Span]) -> ExecutionBatch:
    rows, firsts, ends = (np.array(column, dtype=np.int32) for column in zip(*spans, strict=True))
    prompts = np.array(PROMPTS, dtype=np.int32)[rows]
    # Blocks of a row do not lie side by side.
    tables = np.arange(num_blocks(), dtype=np.int32).reshape(_blocks_of_row(), -1).T[rows]
    sampled = np.flatnonzero(ends >= prompts).astype(np.int32)
    return ExecutionBatch(
        input_tokens=np.concatenate([texts[row, first:end] for row, first, end in spans]),
        positions=np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans]),
        seq_lens=ends,
        block_tables=np.ascontiguousarray(tables),
        is_prefill=firsts < prompts,
        prompt_lens=prompts,
        query_lens=ends - firsts,
        sampled_rows=sampled,
        sampling=[SamplingRow(0.0, 1.0, 0, 0, int(ends[row])) for row in sampled],
        states=rows.copy() if spec.recurrence is not None else np.zeros(0, dtype=np.int32),
    )
