"""How long contexts may be that are computed exactly, where that is less than a model has."""

from __future__ import annotations

from pathlib import Path

import structlog

from compute_plane.model.errors import ModelFileError
from compute_plane.model.spec import LongRopeScaling, RopeScaling

log = structlog.get_logger()


def within_window(path: Path, context_length: int, window: int | None, key: str) -> int:
    """Return how many positions of a model are computed exactly.

    Here every token sees all before it. A model with a window does the same as long as a text is no
    longer than the window. `key`: what the file calls it. Raises ModelFileError.
    """
    if window is None or window >= context_length:
        return context_length
    if window < 1:
        raise ModelFileError(path, f"{key} must be at least 1, got {window}")
    log.warning(
        "contexts are no longer than the model's sliding window",
        max_model_len=window,
        context_length=context_length,
    )
    return window


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
