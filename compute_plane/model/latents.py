"""The numbers of attention over latents (`kernels.reference.latent_attention`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_RANK: Final = 1 << 10
MAX_HEAD_PART: Final = 1 << 9
SIZE_STEP: Final = 32
"""Rows of quantised products are cut into groups of so many."""
MAX_SCORE_SCALE: Final = 1e3


@dataclass(frozen=True, slots=True)
class Latents:
    """What a token leaves in place of keys and values, and how heads read it.

    `rank` R: elements of a latent, which is a product of the hidden state, normalised; `turning` P:
    elements beside it that are rotated. Of a query head `plain` N elements meet the latent and P
    the others. `value_size` V: elements that a head gives. `query_rank`: queries are a product of a
    smaller one, normalised, of so many elements; 0: of the hidden state. `score_scale`: what scores
    are multiplied by. `joins_keys_values`: files have the matrices of keys and values in one.
    """

    rank: int
    turning: int
    plain: int
    value_size: int
    query_rank: int
    score_scale: float
    joins_keys_values: bool = True

    @property
    def row_size(self) -> int:
        """Elements of what a token leaves, R + P; a query head has as many when it attends."""
        return self.rank + self.turning

    @property
    def head_size(self) -> int:
        """Elements of a query head as its product gives it, N + P."""
        return self.plain + self.turning

    def faults(self) -> list[str]:
        """Return what makes these no numbers of a model, one line each; empty if sound."""
        faults = []
        limits = {
            "rank": MAX_RANK, "plain": MAX_HEAD_PART, "value_size": MAX_HEAD_PART,
        }  # fmt: skip
        for name, most in limits.items():
            value = getattr(self, name)
            if value % SIZE_STEP or not 1 <= value <= most:
                faults.append(
                    f"latents: {name} must be a multiple of {SIZE_STEP} up to {most}, got {value}"
                )
        if self.turning % 2 or not 2 <= self.turning <= MAX_HEAD_PART:
            faults.append(
                f"latents: turning must be even, 2 to {MAX_HEAD_PART}, got {self.turning}"
            )
        if self.query_rank < 0 or self.query_rank % SIZE_STEP:
            faults.append(
                f"latents: query_rank must be a multiple of {SIZE_STEP}, got {self.query_rank}"
            )
        if not 0 < self.score_scale <= MAX_SCORE_SCALE:
            faults.append(
                f"latents: score_scale must be up to {MAX_SCORE_SCALE:g}, got {self.score_scale:g}"
            )
        return faults


def latent_score_scale(head_size: int, factor: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return what scores are multiplied by; the last two are of YaRN, where it scales positions.

    `head_size`: N + P. Source: DeepSeek-V2's `yarn_get_mscale`.
    """
    grown = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    return grown * grown / math.sqrt(head_size) if head_size > 0 else math.inf
