"""What directories of Nemotron-H call their tensors.

backbone.embeddings.weight                model.embed_tokens.weight
backbone.norm_f.weight                    model.norm.weight
backbone.layers.N.norm.weight             …input_layernorm.weight, or …post_attention_layernorm.weight
backbone.layers.N.mixer.q_proj.weight     …self_attn.…       k_proj, v_proj, o_proj
backbone.layers.N.mixer.in_proj.weight    …mamba.…           conv1d, A_log, D, dt_bias, norm, out_proj
backbone.layers.N.mixer.up_proj.weight    …mlp.…             down_proj, gate, experts, shared_experts
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from compute_plane.model.spec import ModelSpec

ARCHITECTURE: Final = "nemotron_h"
_FIRST: Final = "backbone."
_LAYERS: Final = f"{_FIRST}layers."
_WHOLE: Final = {
    "backbone.embeddings.weight": "model.embed_tokens.weight",
    "backbone.norm_f.weight": "model.norm.weight",
}
_PARTS: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj"), "mamba"),
    **dict.fromkeys(("up_proj", "down_proj", "gate", "experts", "shared_experts"), "mlp"),
}

T = TypeVar("T")


def canonical_names(stored: Mapping[str, T], spec: ModelSpec) -> dict[str, T]:
    """Return tensors of a directory by the names that other models have for them."""
    return {_canonical(name, spec): entry for name, entry in stored.items()}


def _canonical(name: str, spec: ModelSpec) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    layer, _, rest = name.removeprefix(_LAYERS).partition(".")
    if not name.startswith(_LAYERS) or not layer.isdecimal():
        return name
    if rest == "norm.weight":
        has_mixer = spec.has_mixer(int(layer[:9]))
        rest = f"{'input_layernorm' if has_mixer else 'post_attention_layernorm'}.weight"
    module, _, part = rest.partition("mixer.")
    if not module and part:
        rest = f"{_PARTS.get(part.partition('.')[0], 'mixer')}.{part}"
    return f"model.layers.{layer}.{rest}"
