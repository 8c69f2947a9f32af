"""What is done with logits on a CUDA device, by kernels: adjust them, choose tokens, log-probs.

Few rows are divided among all multiprocessors, in launches one behind the other (`kernels.cuda.
sampling`); what they leave for each other lies in scratch memory, the same for all steps, which run
one after the other. What the grids are depends on the numbers of samples, ids and multiprocessors
alone, and nothing waits for the device, so that launches can be recorded (`repeated`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.cap_logits import CapLogitsVariant
from kernels.cuda.logprob_sums import TOTALS
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.row_splits import num_splits, num_strips
from kernels.cuda.sampling import SamplingVariant
from kernels.cuda.weight_search import ROW_BINS

if TYPE_CHECKING:
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.operands import (
        AdjustColumns,
        LogprobColumns,
        LogprobOutputs,
        SamplingColumns,
    )
    from kernels.cuda.variant import Variant


class LogitsKernels:
    """The operations on logits of `DeviceOperations`. `has_cap`: whether the model caps them."""

    def __init__(self, launcher: Launcher, *, has_cap: bool = False) -> None:
        self._launcher = launcher
        self._cap = CapLogitsVariant() if has_cap else None
        self._adjust = AdjustLogitsVariant()
        self._sample = SamplingVariant()
        self._logprobs = LogprobsVariant()
        self._scratch = _Scratch(launcher.device)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        sample, logprobs = self._sample, self._logprobs
        caps = [] if self._cap is None else [self._cap]
        return [
            *caps, self._adjust, sample.largest, sample.weights, sample.shortlist, sample,
            logprobs.sums, logprobs,
        ]  # fmt: skip

    def cap_logits(self, logits: Tensor, cap: float) -> None:
        """Cap all rows, which are dense, at once."""
        assert self._cap is not None
        assert logits.is_contiguous()
        size = logits.numel()
        self._launcher.launch(self._cap, self._cap.grid(size), logits, size, cap)

    def adjust_logits(self, out: Tensor, logits: Tensor, columns: AdjustColumns) -> None:
        """Copy the samples' rows, then apply bias and penalties to the copies."""
        c = columns
        torch.index_select(logits, 0, c.logits_rows, out=out)
        self._launcher.launch(
            self._adjust,
            self._adjust.grid(len(out)),
            out,
            torch.zeros(out.shape, dtype=torch.int64, device=out.device),
            c.bias_starts,
            c.bias_tokens,
            c.bias_values,
            c.repetition_penalties,
            c.presence_penalties,
            c.frequency_penalties,
            c.history_starts,
            c.history_lengths,
            c.num_prompts,
            c.history,
            int(out.shape[1]),
        )

    def sample(
        self, out: Tensor, is_finite: Tensor, logits: Tensor, columns: SamplingColumns
    ) -> None:
        """Draw in two launches, three or four, by what some sample needs."""
        c, variant, launch = columns, self._sample, self._launcher.launch
        num_samples, (stride, vocab) = len(out), logits_strides(logits)
        share, splits, grid = self._split(num_samples, vocab)
        has_sums, has_bins = c.needs.draws, c.needs.cuts
        num_bins = ROW_BINS if has_bins else 0
        take = self._scratch.take
        keys = take("keys", num_samples, splits)
        strip_sums = take("strip_sums", num_samples if has_sums else 0, num_strips(vocab))
        bins = take("bins", num_samples, num_bins)
        listed = take("listed", num_samples if has_bins else 0, vocab)
        how = (c.inverse_temperatures, c.top_ks, c.top_ps, c.min_ps)
        of_logits = (logits, c.logits_rows)
        sizes = (stride, vocab, share)
        launch(variant.largest, grid, keys, bins, *of_logits, *sizes, num_bins)
        if has_sums:
            launch(variant.weights, grid, strip_sums, bins, keys, *of_logits, *how, *sizes)
        if has_bins:
            launch(
                variant.shortlist, grid, strip_sums, listed, bins, keys, *of_logits, *how, *sizes
            )
        launch(
            variant,
            variant.grid(num_samples),
            out,
            is_finite,
            keys,
            strip_sums,
            bins,
            listed,
            *of_logits,
            *how,
            c.seeds,
            c.sample_indexes,
            c.positions,
            stride,
            vocab,
            splits,
        )

    def logprobs(self, out: LogprobOutputs, logits: Tensor, columns: LogprobColumns) -> None:
        """Write log-probabilities."""
        variant, launch = self._logprobs, self._launcher.launch
        num_samples, (stride, vocab) = len(columns.tokens), logits_strides(logits)
        share, splits, grid = self._split(num_samples, vocab)
        keys, totals, listed = (
            self._scratch.take(name, num_samples, width)
            for name, width in (("keys", splits), ("totals", TOTALS), ("listed", vocab))
        )
        of_logits = (logits, columns.logits_rows)
        sizes = (stride, vocab, share)
        launch(variant.largest, grid, keys, totals, *of_logits, *sizes, TOTALS)
        launch(
            variant.sums, grid, totals, listed, keys, *of_logits, columns.num_logprobs,
            *sizes,
        )  # fmt: skip
        launch(
            variant,
            variant.grid(num_samples),
            out.token_logprobs,
            out.top_tokens,
            out.top_logprobs,
            keys,
            totals,
            listed,
            *of_logits,
            columns.tokens,
            columns.num_logprobs,
            stride,
            vocab,
            splits,
        )

    def _split(self, num_samples: int, vocab: int) -> tuple[int, int, tuple[int, int, int]]:
        """Return the strips of a split, the splits of a row, and the grid over all of them."""
        first = self._sample.largest
        share = first.plan_share(num_samples, vocab, self._launcher.num_multiprocessors)
        splits = num_splits(vocab, share)
        return share, splits, first.split_grid(num_samples, splits)


def logits_strides(logits: Tensor) -> tuple[int, int]:
    """Return the elements from row to row, and those of a row."""
    return int(logits.stride(0)), int(logits.shape[1])


class _Scratch:
    """Memory for what launches leave each other, by what it is for; as much as was ever wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._views: dict[tuple[str, int, int], Tensor] = {}
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, num_samples: int, width: int) -> Tensor:
        """Return int64 [num_samples, width], which the next launch may write, too."""
        key = name, num_samples, width
        view = self._views.get(key)
        if view is None:
            size = num_samples * width
            held = self._held.get(name)
            if held is None or len(held) < size:
                held = torch.empty(size, dtype=torch.int64, device=self._device)
                self._held[name] = held
                self._views.clear()
            view = self._views[key] = held[:size].view(num_samples, width)
        return view
