"""What config.json of a Falcon-H1 has of its own: Mamba-2 beside attention, and multipliers."""

from __future__ import annotations

from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.falcon_multipliers import FalconMultipliers
from compute_plane.model.hf_granite4 import refuse_other_mamba2
from compute_plane.model.json_file import JsonObject
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.spec import MAX_LAYERS

_EXPECTED: Final = {
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "mamba_use_mlp": True,
    "attn_layer_indices": None,
}
"""What runs, and what is meant where nothing is said."""
_D_SSM: Final = "mamba_d_ssm"
_MLP: Final = "mlp_multipliers"
_PARTS: Final = "ssm_multipliers"


def falcon_mamba2(config: JsonObject, norm_eps: float) -> Mamba2:
    """Return what all layers have beside attention.

    Raises ModelFileError, UnsupportedModelError.
    """
    refuse_other_mamba2(config, _EXPECTED)
    has_norm = config.boolean("mamba_rms_norm") is True
    if has_norm and config.boolean("mamba_norm_before_gate") is not False:
        raise UnsupportedModelError(
            config.path, "mamba_norm_before_gate must be false where mamba_rms_norm is true"
        )
    num_heads = config.integer("mamba_n_heads", 128)
    inner_size = config.integer(_D_SSM, 1024)
    if config.has(_D_SSM) and config.raw(_D_SSM) is None:
        inner_size = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if num_heads < 1 or inner_size % num_heads:
        raise ModelFileError(
            config.path, f"{_D_SSM} {inner_size} is not a multiple of mamba_n_heads {num_heads}"
        )
    head_dim = inner_size // num_heads
    if config.raw("mamba_d_head") not in ("auto", None, head_dim):
        raise ModelFileError(
            config.path, f"mamba_d_head must be {head_dim}: {_D_SSM} / mamba_n_heads"
        )
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=config.integer("mamba_d_state", 256),
        kernel_size=config.integer("mamba_d_conv", 4),
        norm_eps=norm_eps,
        layers=frozenset(range(min(config.integer("num_hidden_layers"), MAX_LAYERS))),
        num_groups=config.integer("mamba_n_groups", 1),
        has_norm=has_norm,
    )


def falcon_multipliers(config: JsonObject) -> FalconMultipliers:
    """Return the multipliers; 1 where nothing is said. Raises ModelFileError."""
    gates, mlp_out = _numbers(config, _MLP, 2)
    return FalconMultipliers(
        embedding=config.number("embedding_multiplier", 1.0),
        logits=config.number("lm_head_multiplier", 1.0),
        attention_in=config.number("attention_in_multiplier", 1.0),
        attention_out=config.number("attention_out_multiplier", 1.0),
        keys=config.number("key_multiplier", 1.0),
        ssm_in=config.number("ssm_in_multiplier", 1.0),
        ssm_out=config.number("ssm_out_multiplier", 1.0),
        parts=_numbers(config, _PARTS, 5),
        gates=gates,
        mlp_out=mlp_out,
    )


def _numbers(config: JsonObject, key: str, count: int) -> tuple[float, ...]:
    if config.raw(key) is None:
        return (1.0,) * count
    numbers = config.numbers(key, count)
    if len(numbers) != count:
        raise ModelFileError(config.path, f"{key} must have {count} numbers, got {len(numbers)}")
    return numbers
