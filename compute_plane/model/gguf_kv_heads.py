"""How many key and value heads the layers of a GGUF file have: one number, or one for each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.spec import MAX_LAYERS

KEY: Final = "attention.head_count_kv"


def gguf_num_kv_heads(
    path: Path,
    keys: GgufMetadata,
    prefix: str,
    num_heads: int,
    num_layers: int,
    *,
    may_have_none: bool,
) -> int:
    """Return how many there are in each layer that attends: all must have as many.

    `prefix`: of the architecture's keys. Where nothing is said there are as many as query heads.
    `num_layers`: of the file. `may_have_none`: where a layer has none, it does not attend; of other
    models it must. Raises ModelFileError.
    """
    key = prefix + KEY
    if not _is_said_by_layer(keys, key):
        count = keys.integer(key)
        return num_heads if count is None else count
    counts = set(_counts(path, keys, key, num_layers))
    where = ""
    if may_have_none:
        counts, where = counts - {0}, " where it is not 0"
    if len(counts) != 1:
        raise ModelFileError(
            path, f"{key} must be the same in all layers{where}, got {sorted(counts)[:4]}"
        )
    return counts.pop()


def layers_without_heads(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int
) -> frozenset[int]:
    """Return the layers that do not attend. Raises ModelFileError."""
    key = prefix + KEY
    if not _is_said_by_layer(keys, key):
        return frozenset()
    counts = _counts(path, keys, key, num_layers)
    return frozenset(layer for layer, count in enumerate(counts) if not count)


def _is_said_by_layer(keys: GgufMetadata, key: str) -> bool:
    return keys.has(key) and keys.is_array(key)


def _counts(path: Path, keys: GgufMetadata, key: str, num_layers: int) -> list[int]:
    counts = keys.integers(key, MAX_LAYERS)
    if counts is None or len(counts) != num_layers:
        raise ModelFileError(path, f"{key} must have a number for each of {num_layers} layers")
    return [int(count) for count in counts]
