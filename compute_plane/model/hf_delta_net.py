"""The layers with Gated DeltaNet that a config.json describes."""

from __future__ import annotations

from typing import Final

from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.errors import ModelFileError
from compute_plane.model.hf_model_types import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from compute_plane.model.hf_windows import FULL_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import MAX_LAYERS

MODEL_TYPES_WITH_IT: Final = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
LINEAR_ATTENTION: Final = "linear_attention"
DEFAULT_INTERVAL: Final = 4
"""Of so many layers the last one attends, where nothing is said."""


def config_delta_net(config: JsonObject, model_type: str) -> DeltaNet | None:
    """Return what some layers have in place of attention; None: all attend.

    Which they are `layer_types` says, or else an interval. Raises ModelFileError.
    """
    if model_type not in MODEL_TYPES_WITH_IT:
        return None
    layers = _layers(config, config.integer("num_hidden_layers"))
    if not layers:
        return None
    return DeltaNet(
        num_key_heads=config.integer("linear_num_key_heads", 16),
        num_value_heads=config.integer("linear_num_value_heads", 32),
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        kernel_size=config.integer("linear_conv_kernel_dim", 4),
        layers=layers,
    )


def _layers(config: JsonObject, num_layers: int) -> frozenset[int]:
    kinds = config.raw("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", DEFAULT_INTERVAL)
        if interval < 1:
            raise ModelFileError(
                config.path, f"full_attention_interval must be at least 1, got {interval}"
            )
        return layers_of_interval(interval, num_layers)
    known = (LINEAR_ATTENTION, FULL_ATTENTION)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in known for kind in kinds)
    ):
        raise ModelFileError(
            config.path, f"layer_types must be {' or '.join(known)} for each of {num_layers} layers"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR_ATTENTION)


def layers_of_interval(interval: int, num_layers: int) -> frozenset[int]:
    """Return the layers that do not attend where of so many the last one does.

    Of more layers than a model may have, which is refused elsewhere, the first ones.
    """
    layers = range(min(num_layers, MAX_LAYERS))
    return frozenset(layer for layer in layers if (layer + 1) % interval)
