"""Which rows of logits a step needs, in groups that fit the logits buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compute_plane.executor.interface import ExecutionBatch
from compute_plane.executor.token_layout import TokenLayout

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitsGroup:
    """Rows of logits that exist together.

    `out_tokens`: [O] tokens of the step whose logits they are, ascending. `wanted`: which of the
    step's wants are served by them, and `rows` [len(wanted)]: by which row each.
    """

    out_tokens: Int64Array
    wanted: Int64Array
    rows: Int64Array


def wanted_tokens(batch: ExecutionBatch, layout: TokenLayout) -> Int64Array:
    """Return the token behind which logits are wanted, for each want of a step.

    The wants are the samples, in order, then every target of the prompt log-probabilities.
    """
    sampled = layout.row_ends[batch.sampled_rows] - 1
    if not batch.prompt_logprob_rows:
        return sampled
    prompts = [
        layout.row_ends[row] - batch.query_lens[row] + np.arange(len(targets))
        for row, targets in zip(
            batch.prompt_logprob_rows, batch.prompt_logprob_targets, strict=True
        )
    ]
    return np.concatenate([sampled, *prompts]).astype(np.int64)


def group_logits(tokens: Int64Array, max_rows: int, max_wants: int) -> Iterator[LogitsGroup]:
    """Yield groups of at most `max_rows` rows and `max_wants` wants; wants may share a row."""
    if len(tokens) <= min(max_rows, max_wants) and (tokens[1:] > tokens[:-1]).all():
        if len(tokens):
            every = np.arange(len(tokens))
            yield LogitsGroup(tokens, every, every)
        return
    order = np.argsort(tokens, kind="stable")
    first = 0
    while first < len(order):
        wanted = order[first : first + max_wants]
        out_tokens, rows = np.unique(tokens[wanted], return_inverse=True)
        if len(out_tokens) > max_rows:
            wanted = wanted[: int(np.searchsorted(rows, max_rows))]
            out_tokens, rows = out_tokens[:max_rows], rows[: len(wanted)]
        yield LogitsGroup(out_tokens, wanted, rows)
        first += len(wanted)
