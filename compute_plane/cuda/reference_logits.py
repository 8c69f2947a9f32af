"""What is done with logits, on tensors of torch's CPU device, by `kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.capped_logits import cap_logits
from kernels.reference.exponential import exp
from kernels.reference.logit_adjustments import Adjustments, adjusted_logits
from kernels.reference.logprobs import log_softmax, most_likely
from kernels.reference.philox import uniform
from kernels.reference.sampling import WEIGHT_ONE, draw, first_by_weight, nucleus

if TYPE_CHECKING:
    from compute_plane.cuda.operands import (
        AdjustColumns,
        LogprobColumns,
        LogprobOutputs,
        SamplingColumns,
    )

Array = npt.NDArray[Any]

SEED_MASK: Final = (1 << 64) - 1


class ReferenceLogits:
    """The part of `ReferenceOperations` that looks at logits."""

    def cap_logits(self, logits: Tensor, cap: float) -> None:
        """Cap them in place."""
        cap_logits(logits.numpy(), cap)

    def adjust_logits(self, out: Tensor, logits: Tensor, columns: AdjustColumns) -> None:
        """Apply bias and penalties, sample by sample."""
        rows, adjusted, c = logits.numpy(), out.numpy(), columns
        starts, tokens, values = (t.numpy() for t in (c.bias_starts, c.bias_tokens, c.bias_values))
        history = c.history.numpy()
        for k, logits_row in enumerate(c.logits_rows.tolist()):
            biases = slice(int(starts[k]), int(starts[k + 1]))
            first = int(c.history_starts[k])
            adjustments = Adjustments(
                tokens[biases],
                values[biases],
                float(c.repetition_penalties[k]),
                float(c.presence_penalties[k]),
                float(c.frequency_penalties[k]),
                history[first : first + int(c.history_lengths[k])],
                int(c.num_prompts[k]),
            )
            row = rows[logits_row]
            adjusted[k] = np.where(np.isfinite(row), adjusted_logits(row, adjustments), row)

    def sample(
        self, out: Tensor, is_finite: Tensor, logits: Tensor, columns: SamplingColumns
    ) -> None:
        """Draw, sample by sample."""
        rows = logits.numpy()
        _check_needs(columns, rows.shape[1])
        for k, logits_row in enumerate(columns.logits_rows.tolist()):
            row = rows[logits_row]
            is_good = bool(np.isfinite(row).all())
            is_finite[k] = int(is_good)
            out[k] = _choose(row, columns, k) if is_good else 0

    def logprobs(self, out: LogprobOutputs, logits: Tensor, columns: LogprobColumns) -> None:
        """Write log-probabilities, token by token."""
        rows = logits.numpy()
        counts, tokens = columns.num_logprobs.tolist(), columns.tokens.tolist()
        for k, logits_row in enumerate(columns.logits_rows.tolist()):
            if counts[k] < 0:
                continue
            row = rows[logits_row]
            of_row = log_softmax(row)
            count = min(counts[k], len(row))
            is_good = bool(np.isfinite(row).all())
            best = most_likely(row, count) if is_good else np.zeros(count, dtype=np.int64)
            out.token_logprobs[k] = float(of_row[tokens[k]])
            if count:
                out.top_tokens[k, :count] = torch.from_numpy(best).to(torch.int32)
                out.top_logprobs[k, :count] = torch.from_numpy(of_row[best])


def _check_needs(columns: SamplingColumns, vocab: int) -> None:
    """Raise ValueError where samples need what a device would have left out."""
    is_drawn = columns.inverse_temperatures.numpy() > 0
    top_ks = columns.top_ks.numpy()
    is_cut = is_drawn & (((top_ks > 0) & (top_ks < vocab)) | (columns.top_ps.numpy() < 1.0))
    needs = columns.needs
    if (is_drawn.any() and not needs.draws) or (is_cut.any() and not needs.cuts):
        raise ValueError(f"the samples need more than {needs}")


def _choose(row: Array, columns: SamplingColumns, k: int) -> int:
    """Return the token of sample `k` from its finite row: `kernels.reference.sampling.choose`.

    That one takes the temperature, which its inverse does not give back to the last bit.
    """
    inverse = float(columns.inverse_temperatures[k])
    if inverse == 0.0:
        return int(np.argmax(row))
    shifted = row.astype(np.float64) - np.float64(row.max())
    with np.errstate(over="ignore"):  # as in `integer_weights`
        exponents = shifted * inverse
    weights = np.floor(exp(exponents) * WEIGHT_ONE).astype(np.int64)
    weights = np.where(first_by_weight(weights, int(columns.top_ks[k])), weights, 0)
    weights = np.where(nucleus(weights, float(columns.top_ps[k])), weights, 0)
    weights = np.where(weights >= float(columns.min_ps[k]) * WEIGHT_ONE, weights, 0)
    u = uniform(
        int(columns.seeds[k]) & SEED_MASK,
        int(columns.sample_indexes[k]),
        int(columns.positions[k]),
    )
    return draw(weights, u)
