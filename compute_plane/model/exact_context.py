"""How long contexts may be that are computed exactly, where that is less than a model has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.rope_scaling import LongRopeScaling, RopeScaling, scaled_context_length
from compute_plane.model.spec import ModelSpec

log = structlog.get_logger()


def exact_length(architecture: str, context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions are computed exactly of a model whose file says `context_length`.

    Files of some architectures say what they have after scaling, whatever its kind.
    """
    if ARCHITECTURES[architecture].says_scaled_length:
        return context_length
    return within_original(scaled_context_length(context_length, scaling), scaling)


def within_original(context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions a model has before LongRoPE turns all of them otherwise."""
    if not isinstance(scaling, LongRopeScaling):
        return context_length
    return min(context_length, scaling.original_context_length)


def with_long_contexts(spec: ModelSpec, path: Path, *, are_wanted: bool) -> ModelSpec:
    """Return a model of LongRoPE as it is for long contexts, if they `are_wanted`.

    All positions turn then as those of long contexts do, of short ones too. If they are not wanted,
    somebody may miss them, and is told. Raises UnsupportedModelError if they are and the files do
    not say how.
    """
    scaling = spec.rope_scaling
    if not isinstance(scaling, LongRopeScaling):
        return spec
    long = scaling.long
    if long is None:
        if not are_wanted:
            return spec
        raise UnsupportedModelError(
            path,
            "--long-context: the model has LongRoPE, its files have no factors of long contexts",
        )
    if long.context_length <= spec.context_length:
        return spec
    if are_wanted:
        scaling = replace(scaling, divisors=long.divisors, long=None, is_long=True)
        return replace(spec, rope_scaling=scaling, context_length=long.context_length)
    log.warning(
        "contexts are no longer than those before the model's RoPE scaling changes",
        max_model_len=spec.context_length,
        context_length=long.context_length,
        hint="--long-context, and --max-model-len as long as they shall be",
    )
    return spec
