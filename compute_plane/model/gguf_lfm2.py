"""The layers with a gated convolution that a GGUF file of an LFM2 describes.

attention.head_count_kv   key and value heads of each layer: 0 where it has a convolution
shortconv.l_cache         K, as in `kernels.reference.gated_convolution`
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.gguf_kv_heads import layers_without_heads
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.short_convolution import ShortConvolution

LFM2: Final = ("lfm2", "lfm2moe")


def gguf_convolution(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int
) -> ShortConvolution | None:
    """Return what some layers have in place of attention; None: all attend.

    `prefix`: of the architecture's keys. Raises ModelFileError.
    """
    layers = layers_without_heads(path, keys, prefix, num_layers)
    if not layers:
        return None
    return ShortConvolution(
        channels=keys.require_integer(prefix + "embedding_length"),
        kernel_size=keys.require_integer(prefix + "shortconv.l_cache"),
        layers=layers,
    )
