"""What a caller may ask of one generation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planes.errors import ValidationError

MAX_TEMPERATURE = 2.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Parameters controlling text generation.

    `max_tokens`: tokens to generate at most, ≥ 1.
    `temperature`: 0 is greedy, at most 2.
    `top_p`: nucleus sampling threshold in (0, 1]; 1 keeps the whole vocabulary.
    `seed`: key of the random generator, 0 to 2^64 − 1; None lets the edge draw one.
    `ignore_eos`: go on to `max_tokens` past an end-of-sequence token.
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_p: float = 0.9
    seed: int | None = None
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise ValidationError naming the first field out of range, its limit and its value."""
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int):
            raise ValidationError(
                f"max_tokens must be an integer, got {self.max_tokens!r}", field="max_tokens"
            )
        if self.max_tokens < 1:
            raise ValidationError(
                f"max_tokens must be at least 1, got {self.max_tokens}", field="max_tokens"
            )
        if not _is_real(self.temperature) or not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValidationError(
                f"temperature must be in 0 to {MAX_TEMPERATURE}, got {self.temperature!r}",
                field="temperature",
            )
        if not _is_real(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValidationError(
                f"top_p must be greater than 0 and at most 1, got {self.top_p!r}", field="top_p"
            )
        if self.seed is not None and (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed <= MAX_SEED
        ):
            raise ValidationError(
                f"seed must be an integer in 0 to {MAX_SEED}, got {self.seed!r}", field="seed"
            )


def _is_real(value: object) -> bool:
    """Whether `value` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
