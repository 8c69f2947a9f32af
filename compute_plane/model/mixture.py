"""Mixtures of experts: what config.json says of them (GGUF files: `gguf_mixture`).

    y = Σ over the chosen experts e of  w_e · mlp_e(x)  + σ(x · gateᵀ) · mlp_shared(x)

    s_e      a softmax of the logits x · routerᵀ, or the sigmoid of each
    chosen   the `experts_per_token` with the largest s_e, or the largest s_e + correction_e
    w_e      s_e over the sum of those of the chosen (of sigmoids and 1e-20), or s_e; times a number

Where experts lie in groups, chosen are those with the largest s_e or s_e + correction_e among the
experts of some groups (`Mixture.num_groups`).

The second term only where experts are shared, its first factor only in Qwen's.

Sources: Shazeer et al. 2017; Jiang et al. 2024 (Mixtral); Dai et al. 2024 (DeepSeekMoE: shared
experts); Wang et al. 2024 (corrections). Computed: `kernels.reference.mixture`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.hf_granite4 import EXPERTS, SHARED_SIZE, has_experts
from compute_plane.model.hf_model_types import (
    DEEPSEEK2,
    DEEPSEEK3,
    DOTS1,
    ERNIE_MOE,
    EXAONE_MOE,
    GEMMA4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    GRANITE4,
    GRANITE_MOE,
    KIMI_K2,
    LFM2_MOE,
    MINIMAX_M2,
    MIXTRAL,
    NEMOTRON_H,
    OLMOE,
    QWEN2_MOE,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    SOLAR_OPEN,
)
from compute_plane.model.hf_nemotron import nemotron_mixture
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import Mixture

OWN_WIDTHS: Final = (
    QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, GLM4_MOE, DOTS1, ERNIE_MOE,
    LFM2_MOE, DEEPSEEK2, DEEPSEEK3, KIMI_K2, GLM4_MOE_LITE, EXAONE_MOE, SOLAR_OPEN,
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
    DEEPSEEK2: (64, None),
    DEEPSEEK3: (256, 8),
    KIMI_K2: (256, 8),
    GLM4_MOE_LITE: (64, 4),
    EXAONE_MOE: (64, 8),
    SOLAR_OPEN: (128, 8),
    OLMOE: (64, 8),
    MINIMAX_M2: (256, 8),
}
"""Of a model type with experts: how many, and how many a token, where config.json does not say."""
COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configurations call the number of experts."""
CHOSEN: Final = ("num_experts_per_tok", "moe_k")
SHARED_SIZES: Final = {QWEN2_MOE: 5632, QWEN3_NEXT: 512, QWEN3_5_MOE: 512}
"""Of Qwen's MLPs that all tokens go through, with a gate, where config.json does not say."""


@dataclass(frozen=True, slots=True)
class _Meant:
    """What config.json means of a model that chooses experts as DeepSeek-V3 does.

    `groups`: how many there are, and how many a token has. `counts_shared`: the key of how many
    experts are shared.
    """

    normalises: bool = True
    weight_scale: float = 1.0
    num_shared: int | None = 1
    dense_layers: int = 0
    groups: tuple[int, int] = (1, 1)
    counts_shared: str = "n_shared_experts"


OF_DEEPSEEK3: Final = {
    GLM4_MOE: _Meant(dense_layers=1),
    DOTS1: _Meant(normalises=False, num_shared=None),
    GLM4_MOE_LITE: _Meant(weight_scale=1.8, dense_layers=1),
    DEEPSEEK3: _Meant(weight_scale=2.5, dense_layers=3, groups=(8, 4)),
    KIMI_K2: _Meant(weight_scale=2.5, dense_layers=3, groups=(8, 4)),
    EXAONE_MOE: _Meant(weight_scale=2.5, dense_layers=1, counts_shared="num_shared_experts"),
    SOLAR_OPEN: _Meant(),
}
GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"
"""How DeepSeek-V2 chooses experts."""
DENSE, SPARSE = "dense", "sparse"
"""What the layers of a GLM-4.7-Flash have: one MLP, or experts."""


def config_mixture(config: JsonObject, model_type: str) -> Mixture | None:
    """Return the mixture of a config.json; None for a model type without. Raises ModelFileError."""
    if model_type == NEMOTRON_H:
        mixture = nemotron_mixture(config)
    elif model_type == GEMMA4:
        mixture = _of_gemma4(config)
    else:
        mixture = _mixture(config, model_type)
    return None if mixture is None else checked(config.path, mixture)


def _mixture(config: JsonObject, model_type: str) -> Mixture | None:
    if model_type not in DEFAULTS or (model_type == GRANITE4 and not has_experts(config)):
        return None
    count, chosen = DEFAULTS[model_type]
    num_experts = _first_integer(config, COUNTS, count)
    per_token = _first_integer(config, CHOSEN, chosen)
    if model_type in (QWEN3_MOE, *SHARED_SIZES):
        _refuse_dense_layers(config)
    normalises = True
    if model_type in (QWEN2_MOE, QWEN3_MOE, DOTS1, OLMOE):
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
    elif model_type == MINIMAX_M2:
        mixture = _of_minimax(config, mixture)
    elif model_type == ERNIE_MOE:
        mixture = _of_ernie(config, mixture)
    elif model_type == DEEPSEEK2:
        mixture = _of_deepseek2(config, mixture)
    elif model_type in OF_DEEPSEEK3:
        mixture = _of_deepseek3(config, mixture, OF_DEEPSEEK3[model_type])
    return mixture


def _of_gemma4(config: JsonObject) -> Mixture | None:
    if not config.boolean("enable_moe_block"):
        return None
    return Mixture(
        config.integer("num_experts"),
        config.integer("top_k_experts"),
        shared_size=config.integer("intermediate_size"),
        has_own_norms=True,
    )


def _first_integer(config: JsonObject, keys: tuple[str, ...], default: int | None) -> int:
    """Return the number that the first key there is has; the default, else an error, if none is."""
    for key in keys:
        given = config.optional_integer(key)
        if given is not None:
            return given
    return config.integer(keys[0]) if default is None else default


def _of_deepseek3(config: JsonObject, mixture: Mixture, meant: _Meant) -> Mixture:
    """Return what a model says besides that chooses experts as DeepSeek-V3 does."""
    for key, expected in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        _refuse_other(config, key, expected)
    said = config.boolean("norm_topk_prob")
    num_groups = config.optional_integer("n_group")
    groups_per_token = config.optional_integer("topk_group")
    dense_layers = _dense_layers(config, meant.dense_layers)
    return dataclasses.replace(
        mixture,
        normalises_weights=meant.normalises if said is None else said,
        scores="sigmoid",
        weight_scale=config.number("routed_scaling_factor", meant.weight_scale),
        corrects_choice=True,
        shared_size=_num_shared(config, meant) * config.integer(EXPERT_WIDTH),
        dense_layers=dense_layers,
        dense_size=config.integer("intermediate_size") if dense_layers else 0,
        num_groups=meant.groups[0] if num_groups is None else num_groups,
        groups_per_token=meant.groups[1] if groups_per_token is None else groups_per_token,
    )


def _num_shared(config: JsonObject, meant: _Meant) -> int:
    key = meant.counts_shared
    if config.has(key) and config.optional_integer(key) is None:
        raise UnsupportedModelError(config.path, f"{key} = null is not supported")
    return config.integer(key, meant.num_shared)


def _of_deepseek2(config: JsonObject, mixture: Mixture) -> Mixture:
    """Return what a DeepSeek-V2 says besides."""
    method = config.text("topk_method") or GREEDY
    if method not in (GREEDY, IN_GROUPS):
        raise UnsupportedModelError(
            config.path, f"topk_method must be {GREEDY} or {IN_GROUPS}, got {printable(method)}"
        )
    _refuse_other(config, "scoring_func", "softmax")
    if config.boolean("norm_topk_prob"):
        raise UnsupportedModelError(config.path, "norm_topk_prob = true is not supported")
    num_groups = groups_per_token = 1
    if method == IN_GROUPS:
        num_groups = config.integer("n_group")
        groups_per_token = config.integer("topk_group")
    return dataclasses.replace(
        mixture,
        normalises_weights=False,
        weight_scale=config.number("routed_scaling_factor", 1.0),
        shared_size=_num_shared(config, _Meant(num_shared=2)) * config.integer(EXPERT_WIDTH),
        dense_layers=_dense_layers(config, 0),
        dense_size=config.integer("intermediate_size"),
        num_groups=num_groups,
        groups_per_token=groups_per_token,
    )


def _refuse_other(config: JsonObject, key: str, expected: str) -> None:
    given = config.text(key) or expected
    if given != expected:
        raise UnsupportedModelError(
            config.path, f"{key} must be {expected}, got {printable(given)}"
        )


def _dense_layers(config: JsonObject, default: int) -> int:
    """Return how many layers have one MLP: the first ones."""
    if config.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            config.path, "layers without experts behind layers with them (moe_layer_freq)"
        )
    kinds = config.raw("mlp_layer_types")
    if kinds is None:
        return config.integer("first_k_dense_replace", default)
    num_layers = config.integer("num_hidden_layers")
    count = kinds.count(DENSE) if isinstance(kinds, list) and len(kinds) == num_layers else None
    if count is None or kinds != [DENSE] * count + [SPARSE] * (num_layers - count):
        raise UnsupportedModelError(
            config.path,
            f"mlp_layer_types must be {DENSE} of the first layers and {SPARSE} of all others, "
            f"{num_layers} in all",
        )
    return count


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


def _of_minimax(config: JsonObject, mixture: Mixture) -> Mixture:
    """Return what a MiniMax-M2 says besides."""
    _refuse_other(config, "scoring_func", "sigmoid")
    if config.integer("shared_intermediate_size", 0):
        raise UnsupportedModelError(config.path, "shared_intermediate_size is not supported")
    return dataclasses.replace(mixture, scores="sigmoid", corrects_choice=True)


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


def checked(path: Path, mixture: Mixture) -> Mixture:
    """Return it, if it can be one. Raises ModelFileError."""
    faults = mixture.faults()
    if faults:
        raise ModelFileError(path, "; ".join(faults))
    return mixture
