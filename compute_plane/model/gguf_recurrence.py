"""The layers with a state that a GGUF file describes."""

from __future__ import annotations

from typing import Final

from compute_plane.model import layout, mamba2_layout, stored_names
from compute_plane.model.gguf_delta_net import gguf_delta_net
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_kv_heads import layers_without_heads
from compute_plane.model.gguf_lfm2 import LFM2, gguf_convolution
from compute_plane.model.gguf_mamba2 import FALCON_H1, GRANITE_HYBRID, gguf_mamba2
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.gguf_nemotron import NEMOTRON, layers_with_mlp, norm_epsilon
from compute_plane.model.recurrence import Recurrence
from compute_plane.model.spec import MAX_LAYERS

SAID_BY_HEADS: Final = (*LFM2, GRANITE_HYBRID, *NEMOTRON)
"""Architectures whose layers with a state are those without key and value heads."""


def gguf_recurrence(
    file: GgufFile, keys: GgufMetadata, prefix: str, num_layers: int, layers_ahead: int
) -> Recurrence | None:
    """Return what some layers have in place of attention, or beside it; None: there are no states.

    `prefix`: of the architecture's keys. `layers_ahead`: behind the `num_layers` of the model; they
    attend. Raises ModelFileError.
    """
    architecture, path = prefix.removesuffix("."), file.path
    if architecture in LFM2:
        return gguf_convolution(path, keys, prefix, num_layers)
    if architecture in (GRANITE_HYBRID, *NEMOTRON):
        headless = layers_without_heads(path, keys, prefix, num_layers + layers_ahead)
        layers = headless & frozenset(range(num_layers))
        if architecture in NEMOTRON:
            layers -= layers_with_mlp(path, keys, prefix, num_layers + layers_ahead)
        return gguf_mamba2(path, keys, prefix, layers, norm_epsilon(keys, prefix))
    if architecture == FALCON_H1:
        norm = stored_names.gguf_name(layout.layer_tensor(0, mamba2_layout.NORM))
        return gguf_mamba2(
            path,
            keys,
            prefix,
            frozenset(range(min(num_layers, MAX_LAYERS))),
            norm_epsilon(keys, prefix),
            has_norm=norm in file.tensors,
        )
    return gguf_delta_net(path, keys, prefix, num_layers, layers_ahead)
