"""How long contexts may be that are computed exactly, where that is less than a model has."""

from __future__ import annotations

import structlog

from compute_plane.model.spec import LongRopeScaling, RopeScaling

log = structlog.get_logger()


def within_original(context_length: int, scaling: RopeScaling | None) -> int:
    """Return how many positions a model has before LongRoPE turns all of them otherwise."""
    if (
        not isinstance(scaling, LongRopeScaling)
        or scaling.original_context_length >= context_length
    ):
        return context_length
    log.warning(
        "contexts are no longer than those before the model's LongRoPE scaling",
        max_model_len=scaling.original_context_length,
        context_length=context_length,
    )
    return scaling.original_context_length
