"""How many key and value heads the layers of a GGUF file have: one number, or one for each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.spec import MAX_LAYERS

KEY: Final = "attention.head_count_kv"


def gguf_num_kv_heads(path: Path, keys: GgufMetadata, prefix: str, num_heads: int) -> int:
    """Return how many there are in each layer that attends: all must have as many.

    `prefix`: of the architecture's keys. Where nothing is said there are as many as query heads.
    Raises ModelFileError.
    """
    key = prefix + KEY
    if not (keys.has(key) and keys.is_array(key)):
        count = keys.integer(key)
        return num_heads if count is None else count
    counts = keys.integers(key, MAX_LAYERS)
    different = [] if counts is None else sorted({*counts.tolist()} - {0})
    if len(different) != 1:
        raise ModelFileError(
            path, f"{key} must be the same in all layers where it is not 0, got {different[:4]}"
        )
    return int(different[0])


def layers_without_heads(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int
) -> frozenset[int]:
    """Return the layers that do not attend. Raises ModelFileError."""
    key = prefix + KEY
    if not (keys.has(key) and keys.is_array(key)):
        return frozenset()
    counts = keys.integers(key, MAX_LAYERS)
    if counts is None or len(counts) != num_layers:
        raise ModelFileError(path, f"{key} must have a number for each of {num_layers} layers")
    return frozenset(layer for layer, count in enumerate(counts) if not count)
