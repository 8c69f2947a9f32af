"""The layers with Gated DeltaNet that a GGUF file describes.

Keys are those of state-space models, letters those of `kernels.reference.delta_net`:

    ssm.conv_kernel   K      ssm.group_count      Hk     attention.recurrent_layers   whether each layer is one
    ssm.state_size    Dk     ssm.time_step_rank   Hv     full_attention_interval      of so many the last one is not
    ssm.inner_size    Hv·Dv
"""  # noqa: E501 - a table

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.delta_net_layout import TILED_IN_GGUF
from compute_plane.model.errors import ModelFileError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.hf_delta_net import DEFAULT_INTERVAL, layers_of_interval
from compute_plane.model.spec import MAX_LAYERS

INTERVAL: Final = "full_attention_interval"
RECURRENT: Final = "attention.recurrent_layers"


def gguf_delta_net(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int, layers_ahead: int
) -> DeltaNet | None:
    """Return what some layers have in place of attention; None: all attend.

    `prefix`: of the architecture's keys. `layers_ahead`: behind the `num_layers` of the model; they
    attend. Raises ModelFileError.
    """
    architecture = prefix.removesuffix(".")
    if not ARCHITECTURES[architecture].gates_attention:
        return None
    layers = _layers(path, keys, prefix, num_layers, layers_ahead)
    if not layers:
        return None
    num_key_heads = keys.require_integer(prefix + "ssm.group_count")
    num_value_heads = keys.require_integer(prefix + "ssm.time_step_rank")
    value_size = keys.require_integer(prefix + "ssm.inner_size")
    if num_value_heads < 1 or value_size % num_value_heads:
        raise ModelFileError(
            path,
            f"{prefix}ssm.inner_size {value_size} is not a multiple of "
            f"{prefix}ssm.time_step_rank {num_value_heads}",
        )
    return DeltaNet(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=keys.require_integer(prefix + "ssm.state_size"),
        value_dim=value_size // num_value_heads,
        kernel_size=keys.require_integer(prefix + "ssm.conv_kernel"),
        layers=layers,
        # As many as there are key heads lie either way.
        value_heads_tiled=architecture in TILED_IN_GGUF and num_value_heads != num_key_heads,
    )


def _layers(
    path: Path, keys: GgufMetadata, prefix: str, num_layers: int, layers_ahead: int
) -> frozenset[int]:
    if keys.has(prefix + RECURRENT):
        each = keys.booleans(prefix + RECURRENT, MAX_LAYERS)
        if each is None or len(each) != num_layers + layers_ahead or any(each[num_layers:]):
            raise ModelFileError(
                path,
                f"{prefix}{RECURRENT} must say true or false of each of {num_layers} layers, "
                f"and false of {layers_ahead} behind them",
            )
        return frozenset(layer for layer, is_one in enumerate(each) if is_one)
    interval = keys.integer(prefix + INTERVAL)
    interval = DEFAULT_INTERVAL if interval is None else interval
    if interval < 1:
        raise ModelFileError(path, f"{prefix}{INTERVAL} must be at least 1, got {interval}")
    return layers_of_interval(interval, num_layers)
