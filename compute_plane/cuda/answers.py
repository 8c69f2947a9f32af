"""What came back from the device, as the answer to a batch: everything in the order sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cuda.embeddings import RESULT
from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    SampleLogprobs,
    TopLogprobs,
)
from compute_plane.executor.sampling_rows import logprobs_asked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cuda.sampling_columns import SamplingPlan

Array = npt.NDArray[Any]

NOT_FINITE: Final = "the logits are not finite"


def answer(
    batch: ExecutionBatch,
    plan: SamplingPlan,
    results: dict[str, Array],
    vocab_size: int,
    block_digests: Sequence[int],
) -> ExecutionOutput:
    """Return the output of a step from the columns of `sampling_step.results_layout`."""
    order = plan.sample_order
    is_finite = results["is_finite"]
    failed_rows: dict[int, str] = {}
    if not is_finite.all():
        failed = batch.sampled_rows[_as_sent(is_finite, order) == 0]
        failed_rows = dict.fromkeys(failed.tolist(), NOT_FINITE)
    of_prompts, top_of_prompts = _prompts(batch, plan, results, vocab_size, failed_rows)
    return ExecutionOutput(
        next_tokens=_as_sent(results["tokens"], order),
        failed_rows=failed_rows,
        logits=_as_sent(results["logits"], order) if "logits" in results else None,
        prompt_logprobs=of_prompts,
        sample_logprobs=_sample_logprobs(batch, plan, results, vocab_size),
        prompt_top_logprobs=top_of_prompts,
        block_digests=block_digests,
        embeddings=results.get(RESULT),
    )


def _prompts(
    batch: ExecutionBatch,
    plan: SamplingPlan,
    results: dict[str, Array],
    vocab_size: int,
    failed_rows: dict[int, str],
) -> tuple[Sequence[Array], Sequence[TopLogprobs]]:
    """Return the log-probabilities of prompts; rows of which one is NaN are failed rows."""
    if not batch.prompt_logprob_rows:
        return (), ()
    order = plan.prompt_order
    logprobs, tops = np.zeros(0, dtype=np.float32), None
    if len(order):
        logprobs, tops = (
            _as_sent(results["prompt_logprobs"], order),
            _tops(results, "prompt_", order),
        )
    of_prompts: list[Array] = []
    top_of_prompts: list[TopLogprobs] = []
    counts = batch.prompt_num_logprobs or [0] * len(batch.prompt_logprob_rows)
    first = 0
    for row, targets, count in zip(
        batch.prompt_logprob_rows, batch.prompt_logprob_targets, counts, strict=True
    ):
        places = slice(first, first + len(targets))
        first = places.stop
        of_prompts.append(logprobs[places])
        top_of_prompts.append(_first(tops, places, min(count, vocab_size)))
        if np.isnan(logprobs[places]).any():
            failed_rows[int(row)] = NOT_FINITE
    return of_prompts, top_of_prompts


def _sample_logprobs(
    batch: ExecutionBatch, plan: SamplingPlan, results: dict[str, Array], vocab_size: int
) -> list[SampleLogprobs]:
    if not len(results["logprobs"]):
        return []
    logprobs = _as_sent(results["logprobs"], plan.sample_order).tolist()
    tops = _tops(results, "", plan.sample_order)
    return [
        SampleLogprobs(k, logprobs[k], _first(tops, slice(k, k + 1), min(count, vocab_size)))
        for k, count in logprobs_asked(batch.sampling)
    ]


def _tops(results: dict[str, Array], prefix: str, order: Array) -> TopLogprobs | None:
    """Return all most likely tokens in the order sent; None if nobody asked."""
    if not len(results[f"{prefix}top_tokens"]):
        return None
    return TopLogprobs(
        _as_sent(results[f"{prefix}top_tokens"], order),
        _as_sent(results[f"{prefix}top_logprobs"], order),
    )


def _first(tops: TopLogprobs | None, places: slice, count: int) -> TopLogprobs:
    """Return the first `count` at some places, [P, count] each."""
    if tops is None:
        shape = (places.stop - places.start, count)  # one of them is 0
        return TopLogprobs(np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32))
    return TopLogprobs(tops.token_ids[places, :count], tops.logprobs[places, :count])


def _as_sent(values: Array, order: Array) -> Array:
    """Return values, of which the i-th belongs to place order[i], by place."""
    if (order[1:] > order[:-1]).all():
        return values
    sent = np.empty_like(values)
    sent[order] = values
    return sent
