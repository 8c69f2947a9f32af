"""How the frequencies of rotary positions are scaled for longer contexts: the kinds that there are.

What becomes of the frequencies is computed in `compute_plane.model.rope`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_CONTEXT_LENGTH: Final = (1 << 31) - 1
"""Positions are int32."""
LEAST_SCALING: Final = 1e-6
MOST_SCALING: Final = 1e6
"""Beyond these the numbers of a scaling make frequencies that float32 cannot hold."""

YARN_BETA_FAST: Final = 32.0
YARN_BETA_SLOW: Final = 1.0


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """RoPE frequency scaling by position interpolation: all frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """RoPE frequency scaling of YaRN (Peng et al. 2023).

    Pairs that turn more than `beta_fast` times in `original_context_length` positions are kept,
    those that turn less than `beta_slow` times are divided by `factor`, and those between are
    interpolated. `truncate`: the first and the last pair between are whole ones. Cosines and sines
    are multiplied by `attention_factor`. `query_growth`: from the original length on queries are
    multiplied by more and more (`compute_plane.model.rope.query_growth`); 0: they are not.
    """

    factor: float
    original_context_length: int
    attention_factor: float
    beta_fast: float = YARN_BETA_FAST
    beta_slow: float = YARN_BETA_SLOW
    truncate: bool = True
    query_growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3.1 ("llama3" in Hugging Face configurations).

    Frequencies with a wavelength above `original_context_length / low_freq_factor` are divided by
    `factor`, those below `original_context_length / high_freq_factor` are kept, and those between
    are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """RoPE frequency scaling given as one divisor per frequency, D/2 of them.

    This is how GGUF files store Llama 3 scaling (tensor `rope_freqs.weight`).
    """

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LongContexts:
    """What contexts that are long have: `divisors` of their own, and so many positions."""

    divisors: tuple[float, ...]
    context_length: int


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """RoPE frequency scaling of LongRoPE (Ding et al. 2024).

    `divisors`: one per frequency; those of contexts up to `original_context_length` ("short
    factors"). Longer contexts have others, for their first tokens too, so keys that are in the
    cache would be wrong where a context grows beyond: it ends there. Or all contexts, short ones
    too, have what `long` ones have (`compute_plane.model.exact_context.with_long_contexts`); None:
    they do (`is_long`), or the files do not say. Cosines and sines are multiplied by
    `attention_factor`, in contexts of any length.
    """

    divisors: tuple[float, ...]
    original_context_length: int
    attention_factor: float
    long: LongContexts | None = None
    is_long: bool = False


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling | FrequencyDivisors | LongRopeScaling


def yarn_attention_factor(factor: float, mscale: float = 0, mscale_all_dim: float = 0) -> float:
    """Return the attention factor of a model that names none; the last two count together only."""

    def of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        below = of(mscale_all_dim)
        return of(mscale) / below if below else math.inf
    return of(1.0)


def long_rope_attention_factor(factor: float, original_context_length: int) -> float:
    """Return the attention factor of a LongRoPE model that names none; `factor`: longer so much."""
    if factor <= 1 or original_context_length <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_context_length))


def scaled_context_length(context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions a model has for which its file says `context_length`.

    Files of models with linear scaling say what they had before it, and those with YaRN may. (A
    file with Llama 3 scaling says what it has, and so does Gemma's.)
    """
    scaled = float(context_length)
    if isinstance(scaling, LinearScaling):
        scaled *= scaling.factor
    elif isinstance(scaling, YarnScaling):
        scaled = max(scaled, scaling.original_context_length * scaling.factor)
    return int(min(scaled, MAX_CONTEXT_LENGTH)) if scaled != context_length else context_length


_SCALING_NUMBERS: Final = {
    **dict.fromkeys(
        ("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor",
         "high_freq_factor"),
        LEAST_SCALING,
    ),
    "query_growth": 0.0,
}  # fmt: skip
"""Numbers of scalings, by the least that they may be."""


def _divisor_faults(divisors: tuple[float, ...], num_pairs: int) -> list[str]:
    """Return what is wrong with the divisors of a head's frequencies."""
    if len(divisors) != num_pairs:
        return [
            f"RoPE scaling needs a divisor for each of {num_pairs} pairs of a head, "
            f"got {len(divisors)}"
        ]
    wrong = [divisor for divisor in divisors if not (math.isfinite(divisor) and divisor > 0)]
    return [f"RoPE divisors must be positive and finite, got {wrong[0]}"] if wrong else []


def scaling_faults(scaling: RopeScaling | None, num_turning: int, rope_theta: float) -> list[str]:
    """Return what is wrong with a scaling; `num_turning`: elements of a head that turn."""
    if scaling is None:
        return []
    if isinstance(scaling, FrequencyDivisors | LongRopeScaling):
        faults = _divisor_faults(scaling.divisors, num_turning // 2)
        if isinstance(scaling, LongRopeScaling) and scaling.long is not None and not faults:
            faults = _divisor_faults(scaling.long.divisors, num_turning // 2)
        if faults or isinstance(scaling, FrequencyDivisors):
            return faults
    for name, least in _SCALING_NUMBERS.items():
        value = getattr(scaling, name, 1.0)
        if not least <= value <= MOST_SCALING:
            return [f"RoPE {name} must be {least:g} to {MOST_SCALING:g}, got {value}"]
    if isinstance(scaling, LinearScaling):
        return []
    if not 1 <= scaling.original_context_length <= MAX_CONTEXT_LENGTH:
        return [
            f"RoPE original_max_position_embeddings must be 1 to {MAX_CONTEXT_LENGTH}, "
            f"got {scaling.original_context_length}"
        ]
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        return [
            f"RoPE low_freq_factor must be below high_freq_factor, "
            f"got {scaling.low_freq_factor} and {scaling.high_freq_factor}"
        ]
    if isinstance(scaling, YarnScaling) and scaling.beta_slow > scaling.beta_fast:
        return [
            f"RoPE beta_slow must not be above beta_fast, "
            f"got {scaling.beta_slow} and {scaling.beta_fast}"
        ]
    if isinstance(scaling, YarnScaling) and rope_theta == 1:
        return ["rope_theta must be more than 1 for RoPE scaling yarn"]
    return []
