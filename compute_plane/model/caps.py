"""What scores and logits stay below in some models, as their files say it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError

LEAST: Final = 1e-3
MOST: Final = 1e6
SCORES_CAP: Final = "attn_logit_softcapping"
LOGITS_CAP: Final = "final_logit_softcapping"
"""Keys of both kinds of files."""
OF_GEMMA2: Final = {SCORES_CAP: 50.0, LOGITS_CAP: 30.0}
"""What files of Gemma 2 mean that say nothing of them."""


def checked_cap(path: Path, key: str, cap: float | None) -> float | None:
    """Return a cap that can be one, or None. Raises ModelFileError, naming `key`."""
    if cap is not None and not LEAST <= cap <= MOST:
        raise ModelFileError(path, f"{key} must be {LEAST:g} to {MOST:g}, got {cap}")
    return cap
