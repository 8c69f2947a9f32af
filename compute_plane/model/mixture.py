"""Mixtures of experts: what files say of them.

    y = Σ over the chosen experts e of  w_e · mlp_e(x)

    chosen   the `experts_per_token` with the largest logits x · routerᵀ
    w_e      softmax of the logits, of the chosen ones alone or of all

Sources: Shazeer et al. 2017; Jiang et al. 2024 (Mixtral). Computed: `kernels.reference.mixture`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import Mixture

QWEN3_MOE: Final = "qwen3_moe"
DEFAULTS: Final = {
    QWEN3_MOE: (128, 8),
    "mixtral": (8, 2),
    "granitemoe": (8, 2),
    "gpt_oss": (128, 4),
}
"""Of a model type with experts: how many, and how many a token, where config.json does not say."""
SOFTMAX: Final = 1
"""GGUF's number for the only function of the router that is computed here."""
UNSUPPORTED_COUNTS: Final = {
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "leading_dense_block_count": 0,
    "expert_group_count": 1,
}
"""Keys of GGUF files, and the largest number that changes nothing."""


def config_mixture(config: JsonObject, model_type: str) -> Mixture | None:
    """Return the mixture of a config.json; None for a model type without. Raises ModelFileError."""
    if model_type not in DEFAULTS:
        return None
    num_experts, per_token = DEFAULTS[model_type]
    # transformers 5 writes the first name for all of them; Qwen's own files have the second.
    count = config.integer("num_local_experts", config.integer("num_experts", num_experts))
    chosen = config.integer("num_experts_per_tok", per_token)
    normalises = True
    if model_type == QWEN3_MOE:
        normalises = bool(config.boolean("norm_topk_prob"))
        _refuse_dense_layers(config)
    return checked(config.path, Mixture(count, chosen, normalises_weights=normalises))


def _refuse_dense_layers(config: JsonObject) -> None:
    """Refuse a Qwen3-MoE with layers that have one MLP."""
    if config.integer("decoder_sparse_step", 1) != 1 or config.raw("mlp_only_layers"):
        raise UnsupportedModelError(
            config.path,
            "layers without experts beside layers with them are not supported "
            "(decoder_sparse_step, mlp_only_layers)",
        )


def gguf_mixture(path: Path, keys: GgufMetadata, prefix: str) -> Mixture | None:
    """Return the mixture of a GGUF file, None where it has none.

    `prefix`: of the architecture's keys. Raises ModelFileError, UnsupportedModelError.
    """
    count = keys.integer(prefix + "expert_count")
    experts = ARCHITECTURES[prefix.removesuffix(".")].experts
    if not count and experts != "always":
        return None
    if experts == "never":
        raise UnsupportedModelError(path, "mixtures of experts are not supported")
    for key, most in UNSUPPORTED_COUNTS.items():
        given = keys.integer(prefix + key)
        if given is not None and given > most:
            raise UnsupportedModelError(path, f"{prefix}{key} = {given} is not supported")
    function = keys.integer(prefix + "expert_gating_func")
    if function not in (None, SOFTMAX):
        raise UnsupportedModelError(
            path, f"{prefix}expert_gating_func must be {SOFTMAX} (softmax), got {function}"
        )
    scale = keys.number(prefix + "expert_weights_scale")
    if scale not in (None, 0.0, 1.0):
        raise UnsupportedModelError(path, f"{prefix}expert_weights_scale is not supported")
    mixture = Mixture(
        keys.require_integer(prefix + "expert_count"),
        keys.require_integer(prefix + "expert_used_count"),
        normalises_weights=keys.boolean(prefix + "expert_weights_norm") is not False,
    )
    return checked(path, mixture)


def gguf_intermediate_size(keys: GgufMetadata, prefix: str, mixture: Mixture | None) -> int:
    """Return the width of an MLP, or of an expert: files of some name it apart."""
    of_experts = keys.integer(prefix + "expert_feed_forward_length")
    if mixture is not None and of_experts:
        return of_experts
    return keys.require_integer(prefix + "feed_forward_length")


def checked(path: Path, mixture: Mixture) -> Mixture:
    """Return it, if it can be one. Raises ModelFileError."""
    faults = mixture.faults()
    if faults:
        raise ModelFileError(path, "; ".join(faults))
    return mixture
