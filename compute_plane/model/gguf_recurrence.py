"""The layers with a state that a GGUF file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.gguf_delta_net import gguf_delta_net
from compute_plane.model.gguf_kv_heads import layers_without_heads
from compute_plane.model.gguf_lfm2 import LFM2, gguf_convolution
from compute_plane.model.gguf_mamba2 import GRANITE_HYBRID, gguf_mamba2
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.gguf_nemotron import NEMOTRON, layers_with_mlp, norm_epsilon
from compute_plane.model.recurrence import Recurrence

SAID_BY_HEADS: Final = (*LFM2, GRANITE_HYBRID, *NEMOTRON)
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
    if architecture in (GRANITE_HYBRID, *NEMOTRON):
        headless = layers_without_heads(path, keys, prefix, num_layers + layers_ahead)
        layers = headless & frozenset(range(num_layers))
        if architecture in NEMOTRON:
            layers -= layers_with_mlp(path, keys, prefix, num_layers + layers_ahead)
        return gguf_mamba2(path, keys, prefix, layers, norm_epsilon(keys, prefix))
    return gguf_delta_net(path, keys, prefix, num_layers, layers_ahead)
