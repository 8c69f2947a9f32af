"""The windows of attention that a GGUF file describes."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.spec import MAX_LAYERS
from compute_plane.model.windows import layers_of_period

SLIDING_WINDOW: Final = "attention.sliding_window"
PATTERN: Final = "attention.sliding_window_pattern"
PHI3: Final = "phi3."
GEMMA2: Final = "gemma2."
GEMMA3: Final = "gemma3."
OLMO2: Final = "olmo2."
PERIODS: Final = {GEMMA2: 2, GEMMA3: 6, "gpt-oss.": 2, "exaone4.": 4, "exaone-moe.": 4, OLMO2: 4}
"""Of which the last layer has no window, in models whose files do not say it."""
PHI3_WINDOW: Final = 2047
"""Of Phi-3 models of 4096 positions whose files were made before there was a key for it."""
GEMMA2_WINDOW: Final = 4096
"""Of files of Gemma 2 from before there was a key for it."""


def read_windows(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int, context_length: int
) -> tuple[int | None, Collection[int]]:
    """Return how many positions a token sees, None for all, and the layers in which that is so.

    A window of 0 is none. All layers have it, but for those of `PERIODS`, unless a pattern says
    which: whether each has, or a period, of which the last layer has none. `context_length`: the
    file's. Raises ModelFileError.
    """
    window = keys.integer(prefix + SLIDING_WINDOW) or None
    if prefix == PHI3 and context_length == 4096 and not keys.has(prefix + SLIDING_WINDOW):
        window = PHI3_WINDOW
    if prefix == GEMMA2 and not keys.has(prefix + SLIDING_WINDOW):
        window = GEMMA2_WINDOW
    if prefix == GEMMA3 and window is None:
        return None, ()  # llama.cpp writes none where all layers are global ones
    if not keys.has(prefix + PATTERN):
        return window, layers_of_period(PERIODS.get(prefix, 0), num_layers)
    return window, _layers_of_pattern(path, keys, prefix + PATTERN, num_layers)


def _layers_of_pattern(
    path: Path, keys: GgufMetadata, key: str, num_layers: int
) -> Collection[int]:
    if keys.is_array(key):
        each = keys.booleans(key, MAX_LAYERS)
        if each is None or len(each) != num_layers:
            raise ModelFileError(
                path, f"{key} must have an element for each of {num_layers} layers"
            )
        return [layer for layer, has_window in enumerate(each) if has_window]
    period = keys.require_integer(key)
    if period < 0:
        raise ModelFileError(path, f"{key} must be at least 0, got {period}")
    return layers_of_period(period, num_layers)
