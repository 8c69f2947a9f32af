"""From logits to tokens and log-probabilities on the device, group by group, into one buffer.

The results of a step are columns of one buffer, so that they go back as one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from compute_plane.cuda.columns import Layout
from compute_plane.cuda.embeddings import RESULT
from compute_plane.cuda.masks import apply_masks
from compute_plane.cuda.operands import (
    MAX_LOGPROBS,
    AdjustColumns,
    LogprobColumns,
    LogprobOutputs,
    SamplingColumns,
)
from compute_plane.cuda.sampling_columns import DRAW_TYPES

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.operands import DrawNeeds
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.sampling_columns import GroupPlan, SamplingPlan

PENALTY_COLUMNS: Final = (
    "repetition_penalties", "presence_penalties", "frequency_penalties", "history_starts",
    "history_lengths", "num_prompts",
)  # fmt: skip


def results_layout(
    plan: SamplingPlan,
    vocab_size: int,
    *,
    keep_logits: bool,
    embeddings: tuple[int, int] = (0, 0),
) -> Layout:
    """Return the columns that come back; those of log-probabilities are empty if none asks.

    `embeddings`: how many hidden states are wanted, and how many numbers each has.
    """
    num_samples, num_prompts = len(plan.sample_order), len(plan.prompt_order)
    num_asked = num_samples if any(group.has_logprobs for group in plan.groups) else 0
    int32, float32 = np.int32, np.float32
    arrays: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tokens": (int32, (num_samples,)),
        "is_finite": (int32, (num_samples,)),
        "logprobs": (float32, (num_asked,)),
        "top_tokens": (int32, (num_asked, MAX_LOGPROBS)),
        "top_logprobs": (float32, (num_asked, MAX_LOGPROBS)),
    }
    if num_prompts:
        num_tops = num_prompts if plan.columns["prompt_counts"].any() else 0
        arrays |= {
            "prompt_logprobs": (float32, (num_prompts,)),
            "prompt_top_tokens": (int32, (num_tops, MAX_LOGPROBS)),
            "prompt_top_logprobs": (float32, (num_tops, MAX_LOGPROBS)),
        }
    if keep_logits:
        arrays["logits"] = (float32, (num_samples, vocab_size))
    if embeddings[0]:
        arrays[RESULT] = (np.float64, embeddings)
    return Layout(arrays)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Samples that are drawn together, and where their results go."""

    tokens: Tensor
    is_finite: Tensor
    columns: SamplingColumns

    def run(self, logits: Tensor, operations: DeviceOperations) -> None:
        """Queue it, with logits [R, V]."""
        operations.sample(self.tokens, self.is_finite, logits, self.columns)


@dataclass(frozen=True, slots=True)
class Listing:
    """Tokens whose log-probabilities are wanted, and where they go."""

    out: LogprobOutputs
    columns: LogprobColumns

    def run(self, logits: Tensor, operations: DeviceOperations) -> None:
        """Queue it, with logits [R, V]."""
        operations.logprobs(self.out, logits, self.columns)


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Everything that a group wants of its logits, as tensors; None: nothing of the kind.

    `adjusted`: drawn from logits that are adjusted first, by the columns `adjustments`. `masks`:
    which of these have a mask, and the masks; None: none has. `kept`: where the samples' logits go,
    and their rows.
    """

    plain: Drawing | None
    adjusted: Drawing | None
    adjustments: dict[str, Tensor]
    masks: tuple[Tensor, Tensor] | None
    kept: tuple[Tensor, Tensor] | None
    samples: Listing | None
    prompts: Listing | None

    @classmethod
    def of(
        cls, group: GroupPlan, columns: Mapping[str, Tensor], results: Mapping[str, Tensor]
    ) -> GroupWork:
        """Return the work of a group over a step's columns and results."""
        first, end, middle = group.samples.start, group.samples.stop, group.num_plain
        plain, adjusted = slice(first, first + middle), slice(first + middle, end)
        return cls(
            _drawing(plain, group.plain_needs, columns, results),
            _drawing(adjusted, group.adjusted_needs, columns, results),
            _adjustments(group.adjusted, columns) if end > adjusted.start else {},
            (columns["mask_places"][group.masks], columns["masks"][group.masks])
            if group.masks.stop > group.masks.start
            else None,
            (results["logits"][group.samples], columns["sample_rows"][group.samples])
            if "logits" in results and end > first
            else None,
            _listing(
                group.samples, columns["sample_rows"], results["tokens"], columns["sample_counts"],
                results, "",
            )
            if group.has_logprobs
            else None,
            _listing(
                group.prompts, columns["prompt_rows"], columns["prompt_targets"],
                columns["prompt_counts"], results, "prompt_",
            )
            if group.prompts.stop > group.prompts.start
            else None,
        )  # fmt: skip

    @property
    def is_repeatable(self) -> bool:
        """Whether it may go through `DeviceOperations.repeated`."""
        return self.adjusted is None and self.kept is None

    def run(
        self, logits: Tensor, ragged: Mapping[str, Tensor], operations: DeviceOperations
    ) -> None:
        """Queue it, with logits [R, V]. `ragged`: biases and histories of all adjusted samples."""
        if self.plain is not None:
            self.plain.run(logits, operations)
        if self.adjusted is not None:
            shape = len(self.adjusted.tokens), logits.shape[1]
            own = torch.empty(shape, dtype=torch.float32, device=logits.device)
            how = AdjustColumns(
                bias_tokens=ragged["bias_tokens"],
                bias_values=ragged["bias_values"],
                history=ragged["history"],
                **self.adjustments,
            )
            operations.adjust_logits(own, logits, how)
            if self.masks is not None:
                apply_masks(own, *self.masks)
            self.adjusted.run(own, operations)
        if self.kept is not None:
            target, rows = self.kept
            target.copy_(logits.index_select(0, rows))
        if self.samples is not None:
            self.samples.run(logits, operations)
        if self.prompts is not None:
            self.prompts.run(logits, operations)


def run_group(
    group: GroupPlan,
    logits: Tensor,
    columns: Mapping[str, Tensor],
    results: Mapping[str, Tensor],
    operations: DeviceOperations,
) -> None:
    """Queue everything that a group wants of its logits [R, V]."""
    GroupWork.of(group, columns, results).run(logits, columns, operations)


def _drawing(
    which: slice, needs: DrawNeeds, columns: Mapping[str, Tensor], results: Mapping[str, Tensor]
) -> Drawing | None:
    if which.stop == which.start:
        return None
    drawn = SamplingColumns(
        logits_rows=columns["draw_rows"][which],
        positions=columns["sample_positions"][which],
        needs=needs,
        **{name: columns[name][which] for name in DRAW_TYPES},
    )
    return Drawing(results["tokens"][which], results["is_finite"][which], drawn)


def _adjustments(which: slice, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of `AdjustColumns` with one entry a sample."""
    return {
        "logits_rows": columns["adjust_rows"][which],
        "bias_starts": columns["bias_starts"][which.start : which.stop + 1],
        **{name: columns[name][which] for name in PENALTY_COLUMNS},
    }


def _listing(
    which: slice,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    results: Mapping[str, Tensor],
    prefix: str,
) -> Listing:
    out = (f"{prefix}logprobs", f"{prefix}top_tokens", f"{prefix}top_logprobs")
    return Listing(
        LogprobOutputs(*[results[name][which] for name in out]),
        LogprobColumns(rows[which], tokens[which], counts[which]),
    )
