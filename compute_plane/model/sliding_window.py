"""Models whose attention reaches back a window of tokens only."""

from __future__ import annotations

from pathlib import Path

import structlog

from compute_plane.model.errors import ModelFileError

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
