"""Masks of samples on the device: tokens that may not be drawn get the smallest logit.

Specification: step 5 of `kernels.reference.logit_adjustments`. Steps with a mask go the ordinary
way (not that of `compute_plane.cuda.decode_steps`), and all here are plain operations of torch.

Array letters: K samples with a mask, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from compute_plane.executor.sampling_rows import SamplingRows
from kernels.reference.logit_adjustments import LARGEST, LEAST_ALLOWED
from planes.errors import ValidationError

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.executor.interface import SamplingRow

Array = npt.NDArray[Any]

ROWS_AT_ONCE: Final = 16
"""What a mask takes while it is spread, a byte a token, is taken for so many rows."""


def have_masks(sampling: Sequence[SamplingRow]) -> bool:
    """Whether a sample of a step has a mask."""
    if isinstance(sampling, SamplingRows):
        return sampling.masks is not None
    return any(row.allowed_tokens is not None for row in sampling)


def mask_columns(
    rows: Sequence[SamplingRow], places: Sequence[int], vocab_size: int
) -> dict[str, Array]:
    """Return the masks of samples, int32 words [K, W], and their `places`; nothing without masks.

    Raises ValidationError for one of another length than the vocabulary's.
    """
    given = [row.allowed_tokens for row in rows if row.allowed_tokens is not None]
    if not given:
        return {}
    num_bytes = -(-vocab_size // 8)
    if any(mask.shape != (num_bytes,) for mask in given):
        raise ValidationError(
            f"must have {num_bytes} bytes, a bit for each of {vocab_size} tokens",
            field="sampling.allowed_tokens",
        )
    words = np.zeros((len(given), -(-num_bytes // 4)), dtype=np.int32)
    for mask, target in zip(given, words.view(np.uint8), strict=True):
        target[:num_bytes] = mask
    return {"masks": words, "mask_places": np.array(places, dtype=np.int64)}


def apply_masks(logits: Tensor, places: Tensor, masks: Tensor) -> None:
    """Change the rows `places` [K] of logits [·, V], by `masks` [K, W].

    Rows with a logit that is not finite keep it: sampling reports them.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    vocab_size = logits.shape[1]
    for first in range(0, len(places), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        spread = masks[some].view(torch.uint8).unsqueeze(-1) >> bits & 1
        is_allowed = spread.flatten(1)[:, :vocab_size].to(torch.bool)
        where = places[some]
        rows = logits.index_select(0, where)
        masked = torch.where(is_allowed, rows.clamp_min(float(LEAST_ALLOWED)), -float(LARGEST))
        logits.index_copy_(0, where, torch.where(rows.isfinite(), masked, rows))
