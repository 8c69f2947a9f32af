"""How long contexts may be that are computed exactly, where that is less than a model has."""

from __future__ import annotations

import structlog

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.spec import (
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    scaled_context_length,
)

log = structlog.get_logger()


def exact_length(architecture: str, context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions are computed exactly of a model whose file says `context_length`.

    Files of some architectures say what they have after scaling, whatever its kind.
    """
    if ARCHITECTURES[architecture].says_scaled_length:
        return context_length
    return within_original(scaled_context_length(context_length, scaling), scaling)


def within_original(context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions a model has before its scaling changes what was exact.

    LongRoPE turns all of them otherwise then, and a YaRN may have queries grow.
    """
    if not isinstance(scaling, LongRopeScaling | YarnScaling):
        return context_length
    if isinstance(scaling, YarnScaling) and not scaling.queries_grow:
        return context_length
    if scaling.original_context_length >= context_length:
        return context_length
    log.warning(
        "contexts are no longer than those before the model's RoPE scaling changes",
        max_model_len=scaling.original_context_length,
        context_length=context_length,
    )
    return scaling.original_context_length
