"""The log-probabilities of an executor's answer: whether they fit the batch, and whose they are.

Array letters: S rows, K samples, V vocabulary, P places of a row, n most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from compute_plane.executor.interface import (
    BoolArray,
    ExecutionBatch,
    ExecutionOutput,
    SampleLogprobs,
    TopLogprobs,
)
from compute_plane.executor.row_stage import LiveRows
from compute_plane.executor.sampling_rows import logprobs_asked
from compute_plane.executor.step import PromptLogprobs
from planes.errors import ExecutionError


def check_logprobs(batch: ExecutionBatch, output: ExecutionOutput, vocab_size: int) -> None:
    """Raise ExecutionError unless the answer has the log-probabilities that the batch asks for."""
    lengths = [len(values) for values in output.prompt_logprobs]
    targets = [len(values) for values in batch.prompt_logprob_targets]
    if lengths != targets:
        raise ExecutionError(
            f"the executor must return {targets} prompt log-probabilities, got {lengths}"
        )
    if any(batch.prompt_num_logprobs):
        got = [_shape(top) for top in output.prompt_top_logprobs]
        wanted = [
            (places, min(count, vocab_size))
            for places, count in zip(targets, batch.prompt_num_logprobs, strict=True)
        ]
        if got != wanted:
            raise ExecutionError(
                f"the executor must return {wanted} most likely prompt tokens, got {got}"
            )
    asked = [
        (sample, (1, min(count, vocab_size))) for sample, count in logprobs_asked(batch.sampling)
    ]
    answered = [(entry.sample, _shape(entry.top)) for entry in output.sample_logprobs]
    if answered != asked:
        raise ExecutionError(
            f"the executor must return log-probabilities of samples {asked}, got {answered}"
        )


def _shape(top: TopLogprobs) -> tuple[int, ...]:
    """Return the shape of both arrays, or of neither."""
    return top.token_ids.shape if top.token_ids.shape == top.logprobs.shape else ()


def prompt_logprobs(
    batch: ExecutionBatch, output: ExecutionOutput, rows: LiveRows
) -> list[PromptLogprobs]:
    """Return the prompt log-probabilities under the numbers of the rows as sent."""
    tops: Sequence[TopLogprobs | None] = output.prompt_top_logprobs
    if not any(batch.prompt_num_logprobs):
        tops = [None] * len(output.prompt_logprobs)
    return [
        PromptLogprobs(int(rows.row_of[row]), int(rows.batch.positions[row]) + 1, values, top)
        for row, values, top in zip(
            batch.prompt_logprob_rows, output.prompt_logprobs, tops, strict=True
        )
    ]


def sample_logprobs(
    batch: ExecutionBatch, output: ExecutionOutput, rows: LiveRows, failed: BoolArray
) -> list[SampleLogprobs]:
    """Return the samples' log-probabilities under their numbers as sent, but for failed rows."""
    return [
        SampleLogprobs(int(rows.sample_of[entry.sample]), entry.logprob, entry.top)
        for entry in output.sample_logprobs
        if not failed[batch.sampled_rows[entry.sample]]
    ]
