"""What a GGUF file of a Nemotron-H has of its own: layers that are one thing each.

attention.head_count_kv   of each layer: 0 where it does not attend
feed_forward_length       of each layer: 0 where it has no MLP and no experts
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from compute_plane.model import expert_layout, layout, stored_names
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.spec import MAX_LAYERS, Mixture, ModelSpec

NEMOTRON: Final = ("nemotron_h", "nemotron_h_moe")
_WIDTHS: Final = "feed_forward_length"
_LATENT_SIZE: Final = "moe_latent_size"


def norm_epsilon(keys: GgufMetadata, prefix: str) -> float:
    """Return the epsilon of norms, by which of two names it has; some files have both."""
    said = keys.number(prefix + "attention.layer_norm_rms_epsilon")
    return keys.require_number(prefix + "attention.layer_norm_epsilon") if said is None else said


def widths_of_mlps(path: Path, keys: GgufMetadata, prefix: str, num_layers: int) -> list[int]:
    """Return how wide the MLP of each layer is, or its experts. `num_layers`: of the file."""
    key = prefix + _WIDTHS
    widths = keys.integers(key, MAX_LAYERS)
    if widths is None or len(widths) != num_layers:
        raise ModelFileError(path, f"{key} must have a number for each of {num_layers} layers")
    return [int(width) for width in widths]


def layers_with_mlp(path: Path, keys: GgufMetadata, prefix: str, num_layers: int) -> frozenset[int]:
    """Return the layers that have an MLP, or experts."""
    widths = widths_of_mlps(path, keys, prefix, num_layers)
    return frozenset(layer for layer, width in enumerate(widths) if width)


def nemotron_intermediate_size(path: Path, keys: GgufMetadata, prefix: str, num_layers: int) -> int:
    """Return how wide all MLPs are, or all experts. Raises ModelFileError."""
    said = keys.integer(prefix + "expert_feed_forward_length")
    widths = set(widths_of_mlps(path, keys, prefix, num_layers)) - {0}
    if said:
        return said
    if len(widths) != 1:
        raise ModelFileError(
            path,
            f"{prefix}{_WIDTHS} must be the same in all layers where it is not 0, "
            f"got {sorted(widths)[:4]}",
        )
    return widths.pop()


def with_single_layers(
    file: GgufFile, keys: GgufMetadata, prefix: str, spec: ModelSpec
) -> ModelSpec:
    """Return the spec of a model whose layers are one thing each, without rotary positions."""
    path, count = file.path, spec.num_layers + spec.layers_ahead
    if keys.integer(prefix + _LATENT_SIZE):
        raise UnsupportedModelError(path, f"{prefix}{_LATENT_SIZE} is not supported")
    layers = frozenset(range(min(spec.num_layers, MAX_LAYERS)))
    with_mlp = layers_with_mlp(path, keys, prefix, count) & layers
    return dataclasses.replace(
        spec,
        mixture=_mixture(file, keys, prefix, spec.mixture, with_mlp),
        layers_without_rope=layers,
        layers_without_mixer=with_mlp,
        layers_without_mlp=layers - with_mlp,
    )


def _mixture(
    file: GgufFile,
    keys: GgufMetadata,
    prefix: str,
    mixture: Mixture | None,
    layers: frozenset[int],
) -> Mixture | None:
    """Return what layers with experts have; how wide the shared one is, its tensor says."""
    if mixture is None or not layers:
        return None
    role = f"{expert_layout.SHARED}.{expert_layout.UP}"
    shared = file.tensors.get(stored_names.gguf_name(layout.layer_tensor(min(layers), role)))
    return dataclasses.replace(
        mixture,
        normalises_weights=keys.boolean(prefix + "expert_weights_norm") is not False,
        scores="sigmoid",
        corrects_choice=True,
        shared_size=0 if shared is None else shared.shape[0],
    )
