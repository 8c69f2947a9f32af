"""What files call the tensors of a model (`layout`), and which of theirs are of no use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from compute_plane.model import (
    delta_net_layout,
    expert_layout,
    latent_layout,
    layer_inputs_layout,
    recurrence_layout,
)
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.layout import (
    ATTN_NORM,
    ATTN_OUTPUT_NORM,
    DOWN,
    EMBEDDING,
    FINAL_NORM,
    GATE,
    GATE_UP,
    KEY,
    KEY_NORM,
    LAYER_SCALE,
    LM_HEAD,
    MLP_NORM,
    MLP_OUTPUT_NORM,
    OUTPUT,
    PREFIX,
    QKV,
    QUERY,
    QUERY_NORM,
    SINKS,
    UP,
    VALUE,
    WEIGHT,
    layer_tensor,
)  # fmt: skip
from compute_plane.model.spec import ModelSpec

_NORMS_BEHIND = {
    ATTN_OUTPUT_NORM: "post_attention_layernorm",
    MLP_OUTPUT_NORM: "post_feedforward_layernorm",
}
_OF_GEMMA = {
    ATTN_OUTPUT_NORM: "post_attention_layernorm",
    MLP_NORM: "pre_feedforward_layernorm",
    MLP_OUTPUT_NORM: "post_feedforward_layernorm",
}
_LFM2_NAMES = {
    ATTN_NORM: "operator_norm",
    OUTPUT: "self_attn.out_proj",
    QUERY_NORM: "self_attn.q_layernorm",
    KEY_NORM: "self_attn.k_layernorm",
    MLP_NORM: "ffn_norm",
    GATE: "feed_forward.w1",
    UP: "feed_forward.w3",
    DOWN: "feed_forward.w2",
}
DIRECTORY_NAMES: Mapping[str, Mapping[str, str]] = {
    "falcon-h1": {
        MLP_NORM: "pre_ff_layernorm",
        GATE: "feed_forward.gate_proj",
        UP: "feed_forward.up_proj",
        DOWN: "feed_forward.down_proj",
    },
    "lfm2": _LFM2_NAMES,
    "lfm2moe": _LFM2_NAMES,
    "glm4": {
        ATTN_OUTPUT_NORM: "post_self_attn_layernorm",
        MLP_OUTPUT_NORM: "post_mlp_layernorm",
    },
    "gemma2": _OF_GEMMA,
    "gemma3": _OF_GEMMA,
    "gemma4": _OF_GEMMA,
    "exaone4": _NORMS_BEHIND,
    "olmo2": _NORMS_BEHIND,
}
"""What directories of an architecture call a role, where that is another name."""

GGUF_LAYER_NAMES = {
    ATTN_NORM: "attn_norm",
    QUERY: "attn_q",
    KEY: "attn_k",
    VALUE: "attn_v",
    OUTPUT: "attn_output",
    SINKS: "attn_sinks",
    ATTN_OUTPUT_NORM: "post_attention_norm",
    QUERY_NORM: "attn_q_norm",
    KEY_NORM: "attn_k_norm",
    MLP_NORM: "ffn_norm",
    GATE: "ffn_gate",
    UP: "ffn_up",
    DOWN: "ffn_down",
    MLP_OUTPUT_NORM: "post_ffw_norm",
    QKV: "attn_qkv",
    GATE_UP: "ffn_up",
    LAYER_SCALE: "layer_output_scale",
    **layer_inputs_layout.GGUF_NAMES,
    **recurrence_layout.GGUF_NAMES,
    **expert_layout.GGUF_NAMES,
    **latent_layout.GGUF_NAMES,
}
GGUF_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt-oss": {MLP_NORM: "post_attention_norm"},
    "seed_oss": {MLP_NORM: "post_attention_norm"},
    "glm4moe": {MLP_NORM: "post_attention_norm"},
    "qwen3next": {MLP_NORM: "post_attention_norm"},
    "qwen35": {MLP_NORM: "post_attention_norm"},
    "qwen35moe": {MLP_NORM: "post_attention_norm"},
    "gemma4": expert_layout.GGUF_NAMES_OF_GEMMA4,
    "nemotron_h": {MLP_NORM: "attn_norm"},
    "nemotron_h_moe": {MLP_NORM: "attn_norm"},
}
"""What GGUF files of an architecture call a role, where that is another name."""
GGUF_WHOLE_NAMES: Mapping[str, Mapping[str, str]] = {"falcon-h1": {MLP_NORM: "ffn_norm"}}
"""What GGUF files of an architecture call the weights of a role, without saying that they are."""
GGUF_GLOBAL_NAMES = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    LM_HEAD: "output.weight",
    **layer_inputs_layout.GGUF_GLOBAL_NAMES,
}
_LFM2_LAST_NORM = "model.embedding_norm.weight", "token_embd_norm.weight"
LAST_NORMS: Mapping[str, tuple[str, str]] = {
    "lfm2": _LFM2_LAST_NORM,
    "lfm2moe": _LFM2_LAST_NORM,
    "falcon-h1": ("model.final_layernorm.weight", GGUF_GLOBAL_NAMES[FINAL_NORM]),
}
"""What directories and GGUF files of an architecture call the last norm, where that is another."""
GGUF_ROPE_DIVISORS = "rope_freqs.weight"
GGUF_SHORT_DIVISORS = "rope_factors_short.weight"
GGUF_LONG_DIVISORS = "rope_factors_long.weight"
GGUF_VECTORS = ("exp_probs_b.bias", "ffn_gate_inp_shexp.weight")
"""Have a row in some files, and none in others."""
GGUF_OF_GROUPS = "ssm_norm.weight"
"""Has a row for each group of heads, or none."""
GGUF_COLUMNS = ("ssm_a", "ssm_d")
"""The same of columns."""
AHEAD = ("model.mtp_", "mtp.", "model.mtp.")
"""What layers that predict ahead begin with in directories of ERNIE 4.5, and of Qwen3.5."""
GGUF_OF_ROPE = (GGUF_ROPE_DIVISORS, GGUF_SHORT_DIVISORS, GGUF_LONG_DIVISORS)
"""No tensors of the model: they say how positions are scaled."""


def directory_name(spec: ModelSpec, canonical: str) -> str:
    """Return what a Hugging Face directory calls a canonical tensor."""
    if canonical == FINAL_NORM and spec.architecture in LAST_NORMS:
        return LAST_NORMS[spec.architecture][0]
    if canonical.endswith(f".{SINKS}.{WEIGHT}") and not spec.has_all_biases:
        return canonical.removesuffix(f".{WEIGHT}")
    if canonical.endswith(f".{LAYER_SCALE}.{WEIGHT}"):
        return canonical.removesuffix(f".{WEIGHT}")
    if spec.architecture == expert_layout.GEMMA4:
        layer, _, rest = canonical.removeprefix(f"{PREFIX}layers.").partition(".")
        if rest in expert_layout.NAMES_OF_GEMMA4:
            return f"{PREFIX}layers.{layer}.{expert_layout.NAMES_OF_GEMMA4[rest]}"
    for role, name in DIRECTORY_NAMES.get(spec.architecture, {}).items():
        if canonical.endswith(f".{role}.{WEIGHT}"):
            return canonical.replace(role, name)
    return recurrence_layout.directory_name(canonical)


def begins_at_one(spec: ModelSpec, name: str) -> bool:
    """Tell whether a directory has a tensor as what it is more than 1."""
    is_of_values = name.endswith(f".{delta_net_layout.NORM}.{WEIGHT}")
    return spec.norms_begin_at_one and "norm" in name and not is_of_values


def gguf_name(canonical: str, architecture: str = "") -> str:
    """Return what a GGUF file of an architecture calls a canonical tensor."""
    if canonical == FINAL_NORM and architecture in LAST_NORMS:
        return LAST_NORMS[architecture][1]
    if canonical in GGUF_GLOBAL_NAMES:
        return GGUF_GLOBAL_NAMES[canonical]
    layer, role = canonical.removeprefix("model.layers.").split(".", 1)
    role, _, part = role.rpartition(".")
    if role in recurrence_layout.GGUF_VECTORS:
        return f"blk.{layer}.{recurrence_layout.GGUF_VECTORS[role][part]}"
    if role in GGUF_WHOLE_NAMES.get(architecture, {}):
        return f"blk.{layer}.{GGUF_WHOLE_NAMES[architecture][role]}"
    name = GGUF_OTHER_NAMES.get(architecture, {}).get(role, GGUF_LAYER_NAMES[role])
    return f"blk.{layer}.{name}.{part}"


def is_left_out(spec: ModelSpec, name: str, *, in_gguf: bool) -> bool:
    """Tell whether a tensor of a file is of no use.

    It is of layers that predict ahead, which do not run, or makes keys or values in a layer that
    reads those of an earlier one.
    """
    if spec.kv_sources and _makes_unread_keys(spec, name, in_gguf=in_gguf):
        return True
    if not ARCHITECTURES[spec.architecture].predicts_ahead:
        return False
    if name.startswith(AHEAD):
        return True
    layers, _, rest = name.partition("blk." if in_gguf else f"{PREFIX}layers.")
    number = rest.partition(".")[0]
    if layers or not number.isdecimal():
        return False
    return spec.num_layers <= int(number[:9]) < spec.num_layers + spec.layers_ahead


def _makes_unread_keys(spec: ModelSpec, name: str, *, in_gguf: bool) -> bool:
    to_name = gguf_name if in_gguf else partial(directory_name, spec)
    return name.startswith(
        tuple(
            to_name(layer_tensor(layer, role)).removesuffix(WEIGHT)
            for layer in range(spec.num_layers)
            if spec.kv_source_of(layer) != layer
            for role in (KEY, VALUE, KEY_NORM)
        )
    )


def gguf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a GGUF file's tensor, of vectors without a leading or trailing 1.

    Converters leave it to what had one in directories, and quantisers take it away.
    """
    if name.endswith(GGUF_OF_GROUPS) and len(shape) > 1:
        return (math.prod(shape),)
    if name.endswith(GGUF_VECTORS) and shape[:1] == (1,):
        return shape[1:]
    return shape[:1] if name.endswith(GGUF_COLUMNS) and shape[1:] == (1,) else shape
