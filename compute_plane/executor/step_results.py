"""What an executor answers: whether it fits the batch, and what it says in the numbers as sent.

Array letters: S rows, K samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from compute_plane.executor.decode_run import PreparedStep
from compute_plane.executor.embeddings import row_embeddings
from compute_plane.executor.interface import (
    BoolArray,
    ExecutionBatch,
    ExecutionOutput,
    SampleLogprobs,
)
from compute_plane.executor.logprob_columns import (
    check_logprobs,
    prompt_logprobs,
    sample_logprobs,
)
from compute_plane.executor.row_stage import LiveRows
from compute_plane.executor.step import Int64Array, RowFailure, RowFailureReason, StepResult
from planes.errors import ExecutionError

POISONED: Final = "the slot failed earlier and was not started again"


def check_output(batch: ExecutionBatch, output: ExecutionOutput, vocab_size: int) -> BoolArray:
    """Return which rows failed [S]; raise ExecutionError for an answer that does not fit."""
    num_rows, num_samples = batch.query_lens.size, batch.sampled_rows.size
    next_tokens = np.asarray(output.next_tokens)
    if next_tokens.shape != (num_samples,):
        raise ExecutionError(
            f"the executor must return {num_samples} tokens, got shape {next_tokens.shape}"
        )
    failed = np.zeros(num_rows, dtype=np.bool_)
    for row in output.failed_rows:
        if not 0 <= row < num_rows:
            raise ExecutionError(f"the executor names row {row} of {num_rows}")
        failed[row] = True
    if num_samples and not 0 <= next_tokens.min() <= next_tokens.max() < vocab_size:
        wrong = (next_tokens < 0) | (next_tokens >= vocab_size)
        wrong &= ~failed[batch.sampled_rows]
        if wrong.any():
            raise ExecutionError(
                f"the executor must return tokens below {vocab_size}, "
                f"got {int(next_tokens[wrong][0])}"
            )
    check_logprobs(batch, output, vocab_size)
    if len(output.block_digests) != len(batch.digest_blocks):
        raise ExecutionError(
            f"the executor must return {len(batch.digest_blocks)} block digests, "
            f"got {len(output.block_digests)}"
        )
    return failed


def nothing_run(prepared: PreparedStep) -> StepResult:
    """Return the result of a step that had no row to run."""
    return StepResult(
        np.zeros(prepared.num_samples, dtype=np.int32),
        [_poisoned(row) for row in prepared.rows.poisoned_rows.tolist()],
    )


def step_result(
    prepared: PreparedStep, batch: ExecutionBatch, output: ExecutionOutput, failed: BoolArray
) -> StepResult:
    """Return the result of a step whose rows `failed` [S] have no samples to speak of."""
    rows = prepared.rows
    tokens = np.zeros(prepared.num_samples, dtype=np.int32)
    tokens[rows.sample_of] = output.next_tokens
    failures = [_poisoned(row) for row in rows.poisoned_rows.tolist()]
    failures += [
        RowFailure(int(rows.row_of[row]), RowFailureReason.NOT_FINITE, message)
        for row, message in output.failed_rows.items()
    ]
    return StepResult(
        tokens,
        failures,
        prompt_logprobs(batch, output, rows),
        sample_logprobs(batch, output, rows, failed),
        output.block_digests,
        embeddings=row_embeddings(batch, output, rows),
    )


def with_drafts(
    result: StepResult,
    sent: LiveRows,
    kept: Int64Array,
    draft_logprobs: Sequence[SampleLogprobs],
) -> StepResult:
    """Return the result of a step with drafts, of which `kept` [K] were right in its live rows."""
    kept_drafts = np.zeros(result.sampled_token_ids.size, dtype=np.int64)
    kept_drafts[sent.sample_of] = kept
    numbers = sent.sample_of
    return replace(
        result,
        kept_drafts=kept_drafts,
        draft_logprobs=[
            SampleLogprobs(int(numbers[entry.sample]), entry.logprob, entry.top)
            for entry in draft_logprobs
        ],
    )


def without_dead_rows(result: StepResult, prepared: PreparedStep, is_dead: BoolArray) -> StepResult:
    """Return the result of a step some of whose rows `is_dead` [S] ran on slots that had failed.

    It is what the step would have given, had that been known before it was launched.
    """
    if not is_dead.any():
        return result
    rows = prepared.rows
    dead = rows.row_of[is_dead].tolist()
    poisoned = sorted([*rows.poisoned_rows.tolist(), *dead])
    return replace(
        result,
        row_failures=[
            *(_poisoned(row) for row in poisoned),
            *(
                failure
                for failure in result.row_failures
                if failure.reason is not RowFailureReason.POISONED and failure.row not in dead
            ),
        ],
        prompt_logprobs=[item for item in result.prompt_logprobs if item.row not in dead],
        embeddings=[item for item in result.embeddings if item.row not in dead],
    )


def _poisoned(row: int) -> RowFailure:
    return RowFailure(row, RowFailureReason.POISONED, POISONED)
