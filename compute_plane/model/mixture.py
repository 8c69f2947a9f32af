"""Mixtures of experts: what files say of them.

    y = Σ over the chosen experts e of  w_e · mlp_e(x)  + σ(x · gateᵀ) · mlp_shared(x)

    s_e      a softmax of the logits x · routerᵀ, or the sigmoid of each
    chosen   the `experts_per_token` with the largest s_e, or the largest s_e + correction_e
    w_e      s_e over the sum of those of the chosen (of sigmoids and 1e-20), or s_e; times a number

The second term only where experts are shared, its first factor only in Qwen's.

Sources: Shazeer et al. 2017; Jiang et al. 2024 (Mixtral); Dai et al. 2024 (DeepSeekMoE: shared
experts); Wang et al. 2024 (corrections). Computed: `kernels.reference.mixture`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compute_plane.model import expert_layout, layout
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.hf_granite4 import EXPERTS, SHARED_SIZE, has_experts
from compute_plane.model.hf_model_types import (
    DOTS1,
    ERNIE_MOE,
    GLM4_MOE,
    GPT_OSS,
    GRANITE4,
    GRANITE_MOE,
    LFM2_MOE,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import Mixture, Scores

OWN_WIDTHS: Final = (
    QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, GLM4_MOE, DOTS1, ERNIE_MOE,
    LFM2_MOE,
)  # fmt: skip
"""Model types whose experts have a width by a key of its own."""
EXPERT_WIDTH: Final = "moe_intermediate_size"
DEFAULTS: Final[dict[str, tuple[int | None, int | None]]] = {
    QWEN2_MOE: (60, 4),
    QWEN3_MOE: (128, 8),
    QWEN3_NEXT: (512, 10),
    QWEN3_5_MOE: (256, 8),
    GLM4_MOE: (128, 8),
    ERNIE_MOE: (64, 6),
    DOTS1: (None, None),
    MIXTRAL: (8, 2),
    GRANITE_MOE: (8, 2),
    GPT_OSS: (128, 4),
    LFM2_MOE: (32, 4),
    GRANITE4: (EXPERTS, 2),
}
"""Of a model type with experts: how many, and how many a token, where config.json does not say."""
COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts."""
CHOSEN: Final = ("num_experts_per_tok", "moe_k")
SHARED_SIZES: Final = {QWEN2_MOE: 5632, QWEN3_NEXT: 512, QWEN3_5_MOE: 512}
"""Of Qwen's MLPs that all tokens go through, with a gate, where config.json does not say."""
SOFTMAX, SIGMOID = 1, 2
SCORES: Final[dict[int, Scores]] = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
"""GGUF's numbers for functions of the router."""
UNSUPPORTED_COUNTS: Final = {"expert_group_count": 1, "interleave_moe_layer_step": 1}
"""Keys of GGUF files, and the largest number that changes nothing."""
UNSHARED_COUNTS: Final = {
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "leading_dense_block_count": 0,
}
"""The same, of architectures that share no experts."""


@dataclass(frozen=True, slots=True)
class _Sharing:
    """What GGUF files of an architecture with shared experts mean where they say nothing.

    `normalises`: whether weights are normalised whatever is said; None: if it is said.
    """

    scores: Scores = "softmax"
    normalises: bool | None = None
    gates_shared: bool = False


SHARING: Final = {
    "qwen2moe": _Sharing(normalises=False, gates_shared=True),
    "qwen3next": _Sharing(normalises=True, gates_shared=True),
    "qwen35moe": _Sharing(normalises=True, gates_shared=True),
    "glm4moe": _Sharing("sigmoid"),
    "dots1": _Sharing("sigmoid"),
    "ernie4_5-moe": _Sharing(normalises=True),
    "granitehybrid": _Sharing(normalises=True),
    "lfm2moe": _Sharing("sigmoid", normalises=True),
}


def config_mixture(config: JsonObject, model_type: str) -> Mixture | None:
    """Return the mixture of a config.json; None for a model type without. Raises ModelFileError."""
    if model_type not in DEFAULTS or (model_type == GRANITE4 and not has_experts(config)):
        return None
    count, chosen = DEFAULTS[model_type]
    num_experts = _first_integer(config, COUNTS, count)
    per_token = _first_integer(config, CHOSEN, chosen)
    if model_type in (QWEN3_MOE, *SHARED_SIZES):
        _refuse_dense_layers(config)
    normalises = True
    if model_type in (QWEN2_MOE, QWEN3_MOE, DOTS1):
        normalises = bool(config.boolean("norm_topk_prob"))
    elif model_type == QWEN3_NEXT:
        normalises = config.boolean("norm_topk_prob") is not False
    mixture = Mixture(num_experts, per_token, normalises)
    if model_type in SHARED_SIZES:
        shared_size = SHARED_SIZES[model_type]
        mixture = dataclasses.replace(
            mixture,
            shared_size=config.integer("shared_expert_intermediate_size", shared_size),
            gates_shared=True,
        )
    elif model_type == GRANITE4:
        shared_size = config.integer("shared_intermediate_size", SHARED_SIZE)
        mixture = dataclasses.replace(mixture, shared_size=shared_size)
    elif model_type == LFM2_MOE:
        mixture = _of_lfm2(config, mixture)
    elif model_type == ERNIE_MOE:
        mixture = _of_ernie(config, mixture)
    elif model_type in (GLM4_MOE, DOTS1):
        mixture = _of_glm(config, mixture, model_type)
    return checked(config.path, mixture)


def _first_integer(config: JsonObject, keys: tuple[str, ...], default: int | None) -> int:
    """Return the number that the first key there is has; the default, else an error, if none is."""
    for key in keys:
        given = config.optional_integer(key)
        if given is not None:
            return given
    return config.integer(keys[0]) if default is None else default


def _of_glm(config: JsonObject, mixture: Mixture, model_type: str) -> Mixture:
    """Return what a GLM-4.5 or a dots.llm1 says besides; of transformers' defaults they differ."""
    is_glm = model_type == GLM4_MOE
    for key in ("n_group", "topk_group"):
        if (config.optional_integer(key) or 1) != 1:
            raise UnsupportedModelError(config.path, f"groups of experts are not supported ({key})")
    said = config.boolean("norm_topk_prob")
    num_shared = config.integer("n_shared_experts", 1 if is_glm else None)
    return dataclasses.replace(
        mixture,
        normalises_weights=is_glm if said is None else said,
        scores="sigmoid",
        weight_scale=config.number("routed_scaling_factor", 1.0),
        corrects_choice=True,
        shared_size=num_shared * config.integer(EXPERT_WIDTH),
        dense_layers=config.integer("first_k_dense_replace", 1 if is_glm else 0),
        dense_size=config.integer("intermediate_size"),
    )


def _of_ernie(config: JsonObject, mixture: Mixture) -> Mixture:
    """Return what an ERNIE 4.5 says besides. Its experts are in all layers behind the first."""
    num_layers = config.integer("num_hidden_layers")
    last = config.integer("moe_layer_end_index", -1)
    if config.integer("moe_layer_interval", 1) != 1 or last not in (-1, num_layers - 1):
        raise UnsupportedModelError(
            config.path,
            "layers without experts behind layers with them are not supported "
            "(moe_layer_interval, moe_layer_end_index)",
        )
    return dataclasses.replace(
        mixture,
        corrects_choice=True,
        shared_size=config.integer("moe_num_shared_experts", 2) * config.integer(EXPERT_WIDTH),
        dense_layers=config.integer("moe_layer_start_index", 1),
        dense_size=config.integer("intermediate_size"),
    )


def _of_lfm2(config: JsonObject, mixture: Mixture) -> Mixture:
    """Return what an LFM2 says besides."""
    return dataclasses.replace(
        mixture,
        normalises_weights=config.boolean("norm_topk_prob") is not False,
        scores="sigmoid",
        weight_scale=config.number("routed_scaling_factor", 1.0),
        corrects_choice=config.boolean("use_expert_bias") is not False,
        dense_layers=config.integer("num_dense_layers", 2),
        dense_size=config.integer("intermediate_size"),
    )


def _refuse_dense_layers(config: JsonObject) -> None:
    """Refuse a Qwen with layers that have one MLP."""
    if config.integer("decoder_sparse_step", 1) != 1 or config.raw("mlp_only_layers"):
        raise UnsupportedModelError(
            config.path,
            "layers without experts beside layers with them are not supported "
            "(decoder_sparse_step, mlp_only_layers)",
        )


def gguf_mixture(file: GgufFile, keys: GgufMetadata, prefix: str) -> Mixture | None:
    """Return the mixture of a GGUF file, None where it has none.

    `prefix`: of the architecture's keys. Raises ModelFileError, UnsupportedModelError.
    """
    path, architecture = file.path, prefix.removesuffix(".")
    count = keys.integer(prefix + "expert_count")
    experts = ARCHITECTURES[architecture].experts
    if not count and experts != "always":
        return None
    if experts == "never":
        raise UnsupportedModelError(path, "mixtures of experts are not supported")
    sharing = SHARING.get(architecture)
    unsupported = UNSUPPORTED_COUNTS | (UNSHARED_COUNTS if sharing is None else {})
    for key, most in unsupported.items():
        given = keys.integer(prefix + key)
        if given is not None and given > most:
            raise UnsupportedModelError(path, f"{prefix}{key} = {given} is not supported")
    function = keys.integer(prefix + "expert_gating_func")
    scores: Scores = "softmax" if sharing is None else sharing.scores
    if function and SCORES.get(function) != scores:
        number = next(number for number, name in SCORES.items() if name == scores)
        raise UnsupportedModelError(
            path, f"{prefix}expert_gating_func must be {number} ({scores}), got {function}"
        )
    scale = keys.number(prefix + "expert_weights_scale") or 1.0
    if sharing is None and scale != 1.0:
        raise UnsupportedModelError(path, f"{prefix}expert_weights_scale is not supported")
    said = keys.boolean(prefix + "expert_weights_norm")
    mixture = Mixture(
        keys.require_integer(prefix + "expert_count"),
        keys.require_integer(prefix + "expert_used_count"),
        normalises_weights=said is not False,
        scores=scores,
        weight_scale=scale,
    )
    if sharing is not None:
        mixture = _shared_in_gguf(file, keys, prefix, mixture, sharing)
    return checked(path, mixture)


def _shared_in_gguf(
    file: GgufFile, keys: GgufMetadata, prefix: str, mixture: Mixture, sharing: _Sharing
) -> Mixture:
    """Return what a file with shared experts says besides; how wide those are, its tensors say."""
    dense_layers = keys.integer(prefix + "leading_dense_block_count") or 0

    def tensor(role: str, part: str = layout.WEIGHT) -> tuple[int, ...] | None:
        entry = file.tensors.get(layout.gguf_name(layout.layer_tensor(dense_layers, role, part)))
        return None if entry is None else entry.shape

    shape = tensor(f"{expert_layout.SHARED}.{expert_layout.GATE}")
    normalises = sharing.normalises
    if normalises is None:
        normalises = bool(keys.boolean(prefix + "expert_weights_norm"))
    return dataclasses.replace(
        mixture,
        normalises_weights=normalises,
        corrects_choice=tensor(expert_layout.CORRECTION, layout.BIAS) is not None,
        shared_size=0 if shape is None else shape[0],
        gates_shared=sharing.gates_shared and shape is not None,
        dense_layers=dense_layers,
        dense_size=keys.require_integer(prefix + "feed_forward_length") if dense_layers else 0,
    )


def gguf_intermediate_size(keys: GgufMetadata, prefix: str, mixture: Mixture | None) -> int:
    """Return the width of an MLP, or of an expert: files of some name it apart.

    Older ones of Qwen2-MoE and GLM-4.5 say what the experts of a token have together.
    """
    of_experts = keys.integer(prefix + "expert_feed_forward_length")
    if mixture is not None and of_experts:
        return of_experts
    width = keys.require_integer(prefix + "feed_forward_length")
    if mixture is not None and prefix in ("qwen2moe.", "glm4moe."):
        return width // mixture.experts_per_token
    return width


def checked(path: Path, mixture: Mixture) -> Mixture:
    """Return it, if it can be one. Raises ModelFileError."""
    faults = mixture.faults()
    if faults:
        raise ModelFileError(path, "; ".join(faults))
    return mixture
