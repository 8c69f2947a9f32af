"""What config.json of a Nemotron-H has of its own: layers that are one thing each.

M  mamba, linear_attention    Mamba-2
*  attention, full_attention  attention, without rotary positions
-  mlp                        an MLP without a gate
E  moe                        a mixture of such
"""

from __future__ import annotations

from typing import Final, NamedTuple

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_granite4 import refuse_other_mamba2
from compute_plane.model.json_file import JsonObject
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.spec import MAX_LAYERS, Mixture

_MAMBA, _ATTENTION, _MLP, _MOE = "M", "*", "-", "E"
_NAMES: Final = {
    "mamba": _MAMBA,
    "linear_attention": _MAMBA,
    "mlp": _MLP,
    "moe": _MOE,
    "attention": _ATTENTION,
    "full_attention": _ATTENTION,
}
_EXPECTED: Final = {
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "moe_latent_size": None,
}
"""What runs, and what is meant where nothing is said."""


class NemotronLayers(NamedTuple):
    """What the layers of a model are, a letter each."""

    letters: str

    def of(self, letters: str) -> frozenset[int]:
        """Return the layers that are one of some."""
        return frozenset(at for at, letter in enumerate(self.letters) if letter in letters)

    @property
    def without_mixer(self) -> frozenset[int]:
        """Those with an MLP or experts."""
        return self.of(_MLP + _MOE)

    @property
    def without_mlp(self) -> frozenset[int]:
        """Those with attention or a state."""
        return self.of(_MAMBA + _ATTENTION)

    @property
    def has_experts(self) -> bool:
        """Whether any is a mixture."""
        return _MOE in self.letters


def nemotron_layers(config: JsonObject) -> NemotronLayers:
    """Return what the layers are. Raises ModelFileError, UnsupportedModelError."""
    kinds = config.raw("layers_block_type")
    kinds = config.raw("layer_types") if kinds is None else kinds
    kinds = config.raw("hybrid_override_pattern") if kinds is None else kinds
    if isinstance(kinds, list):
        kinds = "".join(_NAMES.get(str(kind), "?") for kind in kinds)
    if not isinstance(kinds, str) or not {*kinds} <= {*_NAMES.values()}:
        raise ModelFileError(
            config.path,
            f"layers_block_type must be one of {', '.join(_NAMES)} for each layer",
        )
    if not 1 <= len(kinds) <= MAX_LAYERS:
        raise ModelFileError(
            config.path, f"there must be 1 to {MAX_LAYERS} layers, got {len(kinds)}"
        )
    said = config.optional_integer("num_hidden_layers")
    if said is not None and said != len(kinds):
        raise ModelFileError(
            config.path, f"num_hidden_layers is {said}, but {len(kinds)} layers are named"
        )
    if _MLP in kinds and _MOE in kinds:
        raise UnsupportedModelError(
            config.path, "layers with one MLP beside layers with experts are not supported"
        )
    return NemotronLayers(kinds)


def nemotron_mamba2(config: JsonObject, norm_eps: float) -> Mamba2 | None:
    """Return what some layers have in place of attention; None: all attend."""
    layers = nemotron_layers(config).of(_MAMBA)
    refuse_other_mamba2(config, _EXPECTED)
    if not layers:
        return None
    return Mamba2(
        num_heads=config.integer("mamba_num_heads", 128),
        head_dim=config.integer("mamba_head_dim", 64),
        state_size=config.integer("ssm_state_size", 128),
        kernel_size=config.integer("conv_kernel", 4),
        norm_eps=norm_eps,
        layers=layers,
        num_groups=config.integer("n_groups", 8),
    )


def nemotron_mixture(config: JsonObject) -> Mixture | None:
    """Return the mixture that layers with experts have; None: there are none."""
    if not nemotron_layers(config).has_experts:
        return None
    return Mixture(
        config.integer("n_routed_experts", 8),
        config.integer("num_experts_per_tok", 2),
        normalises_weights=config.boolean("norm_topk_prob") is not False,
        scores="sigmoid",
        weight_scale=config.number("routed_scaling_factor", 1.0),
        corrects_choice=True,
        shared_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        num_groups=config.integer("n_group", 1),
        groups_per_token=config.integer("topk_group", 1),
    )


def nemotron_intermediate_size(config: JsonObject) -> int:
    """Return the width of an MLP, or of an expert."""
    if nemotron_layers(config).has_experts:
        return config.integer("moe_intermediate_size", 7688)
    return config.integer("intermediate_size", 21504)
