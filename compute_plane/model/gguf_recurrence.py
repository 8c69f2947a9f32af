"""The layers with a state that a GGUF file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.gguf_delta_net import gguf_delta_net
from compute_plane.model.gguf_lfm2 import LFM2, gguf_convolution
from compute_plane.model.gguf_mamba2 import GRANITE_HYBRID, gguf_mamba2
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.recurrence import Recurrence

SAID_BY_HEADS: Final = (*LFM2, GRANITE_HYBRID)
"""Architectures whose layers with a state are those without key and value heads."""


def gguf_recurrence(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int, layers_ahead: int
) -> Recurrence | None:
    """Return what some layers have in place of attention; None: all attend.

    `prefix`: of the architecture's keys. `layers_ahead`: behind the `num_layers` of the model; they
    attend. Raises ModelFileError.
    """
    architecture = prefix.removesuffix(".")
    if architecture in LFM2:
        return gguf_convolution(path, keys, prefix, num_layers)
    if architecture == GRANITE_HYBRID:
        return gguf_mamba2(path, keys, prefix, num_layers)
    return gguf_delta_net(path, keys, prefix, num_layers, layers_ahead)
