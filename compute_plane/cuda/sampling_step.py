"""From logits to tokens and log-probabilities on the device, group by group, into one buffer.

The results of a step are columns of one buffer, so that they go back as one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from compute_plane.cuda.columns import Layout
from compute_plane.cuda.operations import (
    MAX_LOGPROBS,
    AdjustColumns,
    LogprobColumns,
    LogprobOutputs,
    SamplingColumns,
)

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.operations import DeviceOperations, DrawNeeds
    from compute_plane.cuda.sampling_columns import GroupPlan, SamplingPlan

DRAW_COLUMNS: Final = (
    "inverse_temperatures", "top_ks", "top_ps", "min_ps", "seeds", "sample_indexes",
)  # fmt: skip
PENALTY_COLUMNS: Final = (
    "repetition_penalties", "presence_penalties", "frequency_penalties", "history_starts",
    "history_lengths", "num_prompts",
)  # fmt: skip


def results_layout(plan: SamplingPlan, vocab_size: int, *, keep_logits: bool) -> Layout:
    """Return the columns that come back; those of log-probabilities are empty if none asks."""
    num_samples, num_prompts = len(plan.sample_order), len(plan.prompt_order)
    num_asked = num_samples if any(group.has_logprobs for group in plan.groups) else 0
    has_tops = num_prompts and bool(plan.columns["prompt_counts"].any())
    num_tops = num_prompts if has_tops else 0
    int32, float32 = np.int32, np.float32
    arrays: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tokens": (int32, (num_samples,)),
        "is_finite": (int32, (num_samples,)),
        "logprobs": (float32, (num_asked,)),
        "top_tokens": (int32, (num_asked, MAX_LOGPROBS)),
        "top_logprobs": (float32, (num_asked, MAX_LOGPROBS)),
        "prompt_logprobs": (float32, (num_prompts,)),
        "prompt_top_tokens": (int32, (num_tops, MAX_LOGPROBS)),
        "prompt_top_logprobs": (float32, (num_tops, MAX_LOGPROBS)),
    }
    if keep_logits:
        arrays["logits"] = (float32, (num_samples, vocab_size))
    return Layout(arrays)


def run_group(
    group: GroupPlan,
    logits: Tensor,
    columns: dict[str, Tensor],
    results: dict[str, Tensor],
    operations: DeviceOperations,
) -> None:
    """Queue everything that a group wants of its logits [R, V]."""
    first, end = group.samples.start, group.samples.stop
    plain, adjusted = slice(first, first + group.num_plain), slice(first + group.num_plain, end)
    if group.num_plain:
        _sample(plain, group.plain_needs, logits, columns, results, operations)
    if group.adjusted.stop > group.adjusted.start:
        own = torch.empty(
            (end - adjusted.start, logits.shape[1]), dtype=torch.float32, device=logits.device
        )
        operations.adjust_logits(own, logits, _adjust_columns(group.adjusted, columns))
        _sample(adjusted, group.adjusted_needs, own, columns, results, operations)
    if "logits" in results and end > first:
        rows = columns["sample_rows"][group.samples].long()
        results["logits"][group.samples] = logits.index_select(0, rows)
    if group.has_logprobs:
        s = group.samples
        wanted = LogprobColumns(
            columns["sample_rows"][s], results["tokens"][s], columns["sample_counts"][s]
        )
        out = LogprobOutputs(
            results["logprobs"][s], results["top_tokens"][s], results["top_logprobs"][s]
        )
        operations.logprobs(out, logits, wanted)
    if group.prompts.stop > group.prompts.start:
        p = group.prompts
        wanted = LogprobColumns(
            columns["prompt_rows"][p], columns["prompt_targets"][p], columns["prompt_counts"][p]
        )
        out = LogprobOutputs(
            results["prompt_logprobs"][p],
            results["prompt_top_tokens"][p],
            results["prompt_top_logprobs"][p],
        )
        operations.logprobs(out, logits, wanted)


def _sample(
    which: slice,
    needs: DrawNeeds,
    logits: Tensor,
    columns: dict[str, Tensor],
    results: dict[str, Tensor],
    operations: DeviceOperations,
) -> None:
    drawn = SamplingColumns(
        logits_rows=columns["draw_rows"][which],
        positions=columns["sample_positions"][which],
        needs=needs,
        **{name: columns[name][which] for name in DRAW_COLUMNS},
    )
    operations.sample(results["tokens"][which], results["is_finite"][which], logits, drawn)


def _adjust_columns(which: slice, columns: dict[str, Tensor]) -> AdjustColumns:
    return AdjustColumns(
        logits_rows=columns["adjust_rows"][which],
        bias_starts=columns["bias_starts"][which.start : which.stop + 1],
        bias_tokens=columns["bias_tokens"],
        bias_values=columns["bias_values"],
        history=columns["history"],
        **{name: columns[name][which] for name in PENALTY_COLUMNS},
    )
