"""What config.json says of a Granite 4: its layers with Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_delta_net import LINEAR_ATTENTION
from compute_plane.model.hf_windows import FULL_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.spec import MAX_LAYERS

SHARED_SIZE: Final = 1024
"""Of the MLP that all tokens go through, where it is not said."""
EXPERTS: Final = 8
"""How many there are where it is not said."""
ATTENTION: Final = ("attention", FULL_ATTENTION)
MAMBA: Final = ("mamba", LINEAR_ATTENTION)
EXPECTED: Final = {"mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False}
"""What runs, and what is meant where nothing is said."""
UNLIMITED: Final = ([0, float("inf")], [0, {"__float__": "Infinity"}])
"""Bounds of time steps that bound nothing, as JSON may have them."""


def has_experts(config: JsonObject) -> bool:
    """Tell whether layers have a mixture of experts. Raises ModelFileError."""
    return config.integer("num_local_experts", EXPERTS) != 0


def refuse_other_mamba2(config: JsonObject, expected: Mapping[str, object]) -> None:
    """Raise UnsupportedModelError for what is said otherwise than `expected`, and for bounds."""
    for key, wanted in expected.items():
        given = config.raw(key)
        if given is not None and given != wanted:
            raise UnsupportedModelError(
                config.path, f"{key} must be {str(wanted).lower()}, got {given!r:.40}"
            )
    limits = config.raw("time_step_limit")
    if limits is not None and limits not in UNLIMITED:
        raise UnsupportedModelError(config.path, "bounds of time steps are not supported")


def config_mamba2(config: JsonObject, norm_eps: float) -> Mamba2 | None:
    """Return what some layers have in place of attention; None: all attend.

    `norm_eps`: of all norms. Raises ModelFileError, UnsupportedModelError.
    """
    layers = _layers(config, config.integer("num_hidden_layers"))
    if not layers:
        return None
    refuse_other_mamba2(config, EXPECTED)
    num_heads = config.integer("mamba_n_heads", 128)
    inner_size = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if num_heads < 1 or inner_size % num_heads:
        raise ModelFileError(
            config.path,
            f"mamba_expand · hidden_size {inner_size} is not a multiple of "
            f"mamba_n_heads {num_heads}",
        )
    head_dim = inner_size // num_heads
    if config.raw("mamba_d_head") not in ("auto", None, head_dim):
        raise ModelFileError(
            config.path,
            f"mamba_d_head must be {head_dim}: mamba_expand · hidden_size / mamba_n_heads",
        )
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state", 256),
        kernel_size=config.integer("mamba_d_conv", 4),
        norm_eps=norm_eps,
        layers=layers,
    )


def _layers(config: JsonObject, num_layers: int) -> frozenset[int]:
    """Return the layers that do not attend; where nothing is said, that is all of them."""
    if num_layers > MAX_LAYERS:  # refused with the other numbers
        return frozenset()
    kinds = config.raw("layer_types")
    kinds = config.raw("layers_block_type") if kinds is None else kinds
    if kinds is None:
        return frozenset(range(num_layers))
    known = (*ATTENTION, *MAMBA)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in known for kind in kinds)
    ):
        raise ModelFileError(
            config.path, f"layer_types must be {', '.join(known)} for each of {num_layers} layers"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind in MAMBA)
