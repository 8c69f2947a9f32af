"""How a text's embedding is made of the hidden states of its tokens, as model files say it.

    mean       the mean of all tokens'
    last       the last token's
    cls, …     anything else: named here, refused by whoever is asked for an embedding
    (empty)    the files do not say

Read as it stands: a model may well generate text whatever its pooling is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from compute_plane.model.errors import ModelFileError
from compute_plane.model.json_file import JsonObject

if TYPE_CHECKING:
    from compute_plane.model.gguf_metadata import GgufMetadata

MEAN: Final = "mean"
LAST: Final = "last"

POOLING_TYPE: Final = "pooling_type"
GGUF_TYPES: Final = ("", MEAN, "cls", LAST, "rank")
"""By llama.cpp's numbers."""

CONFIG: Final = "1_Pooling/config.json"
"""Where sentence-transformers keep it; a directory without one is no model of theirs."""
MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": LAST,
}


def gguf_pooling(path: Path, keys: GgufMetadata, prefix: str) -> str:
    """Return the pooling that a GGUF file says. Raises ModelFileError for a number without one."""
    kind = keys.integer(prefix + POOLING_TYPE)
    if kind is None:
        return ""
    if not 0 <= kind < len(GGUF_TYPES):
        raise ModelFileError(
            path, f"{prefix}{POOLING_TYPE} must be below {len(GGUF_TYPES)}, got {kind}"
        )
    return GGUF_TYPES[kind]


def directory_pooling(directory: Path) -> str:
    """Return the pooling that a directory of sentence-transformers says.

    Where several are joined to one vector, their names joined by +. Raises ModelFileError.
    """
    path = directory / CONFIG
    if not path.is_file():
        return ""
    config = JsonObject.read(path)
    return "+".join(name for key, name in MODES.items() if config.boolean(key))
