"""Which tensors a model has, what shape each has, and what GGUF calls them.

The canonical names are those of Hugging Face checkpoints.

    canonical                                        GGUF                      shape
    model.embed_tokens.weight                        token_embd.weight         [V, hidden]
    model.layers.N.input_layernorm.weight            blk.N.attn_norm.weight    [hidden]
    model.layers.N.self_attn.q_proj.weight           blk.N.attn_q.weight       [H·D, hidden]
    model.layers.N.self_attn.k_proj.weight           blk.N.attn_k.weight       [G·D, hidden]
    model.layers.N.self_attn.v_proj.weight           blk.N.attn_v.weight       [G·D, hidden]
    model.layers.N.self_attn.o_proj.weight           blk.N.attn_output.weight  [hidden, H·D]
    model.layers.N.post_attention_layernorm.weight   blk.N.ffn_norm.weight     [hidden]
    model.layers.N.mlp.gate_proj.weight              blk.N.ffn_gate.weight     [intermediate, hidden]
    model.layers.N.mlp.up_proj.weight                blk.N.ffn_up.weight       [intermediate, hidden]
    model.layers.N.mlp.down_proj.weight              blk.N.ffn_down.weight     [hidden, intermediate]
    model.norm.weight                                output_norm.weight        [hidden]
    lm_head.weight (unless tied)                     output.weight             [V, hidden]
  Qwen2, GLM-4, Seed-OSS and some of GLM-4.5 have besides, and likewise of k and v [G·D]:
    model.layers.N.self_attn.q_proj.bias             blk.N.attn_q.bias         [H·D]
  Qwen3, EXAONE 4, dots.llm1 and some of GLM-4.5 have besides, and OLMo 2 of all heads, [H·D] and [G·D]:
    model.layers.N.self_attn.q_norm.weight           blk.N.attn_q_norm.weight  [D]
    model.layers.N.self_attn.k_norm.weight           blk.N.attn_k_norm.weight  [D]
  gpt-oss has besides, with biases of q, k, v and o (….bias), a score of each query head, and Granite with windows:
    model.layers.N.self_attn.sinks.weight            blk.N.attn_sinks.weight   [H], in directories self_attn.sinks
  Its GGUF files, Seed-OSS's, GLM-4.5's and Qwen3.5's call the norm before the MLP post_attention_norm (`GGUF_OTHER_NAMES`), its
  directories have other names for all but plain matrices (`stacked_experts`).
  Gemma 3, GLM-4 and, in the place of the norms before attention and MLP, EXAONE 4 and OLMo 2 have:
    model.layers.N.self_attn.output_norm.weight      blk.N.post_attention_norm.weight   [hidden]
    model.layers.N.mlp.output_norm.weight            blk.N.post_ffw_norm.weight         [hidden]
  In their directories these (of Gemma 3 the norm before the MLP, too) have names of their own (`DIRECTORY_NAMES`).
  Files of Phi-3 have in place of q, k and v, and (GLM-4's, too) of gate and up, their rows in this order:
    model.layers.N.self_attn.qkv_proj.weight         blk.N.attn_qkv.weight     [(H + 2·G)·D, hidden]
    model.layers.N.mlp.gate_up_proj.weight           blk.N.ffn_up.weight       [2·intermediate, hidden]
  Directories of Granite 4 have in place of gate and up, and of down, without experts of the MLP, else of the shared one:
    model.layers.N.shared_mlp.input_linear.weight                              [2·intermediate, hidden]
    model.layers.N.shared_mlp.output_linear.weight                             [hidden, intermediate]
  Of layers behind the last one, which predict ahead, nothing is used (`is_left_out`).
  Mixtures of experts have a router and experts in place of the MLP (`expert_layout`). Qwen3.5, Qwen3-Next, LFM2 and Granite 4
  have something else in place of attention in most layers (`recurrence_layout`), Qwen's gates in the others (`delta_net_layout`).
  DeepSeek's layers have something else for q, k and v: `latent_layout`.
  LFM2's directories have other names for nearly everything (`DIRECTORY_NAMES`), its files for the last norm.
"""  # noqa: E501 - a table

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from compute_plane.model import (
    delta_net_layout,
    expert_layout,
    latent_layout,
    recurrence_layout,
)
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import IntArray

PREFIX = "model."
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

ATTN_NORM = "input_layernorm"
QUERY = "self_attn.q_proj"
QUERY_GATE = delta_net_layout.QUERY_GATE
KEY = "self_attn.k_proj"
VALUE = "self_attn.v_proj"
OUTPUT = "self_attn.o_proj"
SINKS = "self_attn.sinks"
ATTN_OUTPUT_NORM = "self_attn.output_norm"
QUERY_NORM = "self_attn.q_norm"
KEY_NORM = "self_attn.k_norm"
MLP_NORM = "post_attention_layernorm"
GATE = "mlp.gate_proj"
UP = "mlp.up_proj"
DOWN = "mlp.down_proj"
MLP_OUTPUT_NORM = "mlp.output_norm"
QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
_NORMS_BEHIND = {
    ATTN_OUTPUT_NORM: "post_attention_layernorm",
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
    "lfm2": _LFM2_NAMES,
    "lfm2moe": _LFM2_NAMES,
    "glm4": {
        ATTN_OUTPUT_NORM: "post_self_attn_layernorm",
        MLP_OUTPUT_NORM: "post_mlp_layernorm",
    },
    "gemma3": {
        ATTN_OUTPUT_NORM: "post_attention_layernorm",
        MLP_NORM: "pre_feedforward_layernorm",
        MLP_OUTPUT_NORM: "post_feedforward_layernorm",
    },
    "exaone4": _NORMS_BEHIND,
    "olmo2": _NORMS_BEHIND,
}
"""What directories of an architecture call a role, where that is another name."""

WEIGHT = "weight"
BIAS = "bias"

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
    "nemotron_h": {MLP_NORM: "attn_norm"},
    "nemotron_h_moe": {MLP_NORM: "attn_norm"},
}
"""What GGUF files of an architecture call a role, where that is another name."""
GGUF_GLOBAL_NAMES = {
    EMBEDDING: "token_embd.weight",
    FINAL_NORM: "output_norm.weight",
    LM_HEAD: "output.weight",
}
_LFM2_LAST_NORM = "model.embedding_norm.weight", "token_embd_norm.weight"
LAST_NORMS: Mapping[str, tuple[str, str]] = {"lfm2": _LFM2_LAST_NORM, "lfm2moe": _LFM2_LAST_NORM}
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


def layer_tensor(layer: int, role: str, part: str = WEIGHT) -> str:
    """Return the canonical name of a layer's tensor; `role` is one of this module's constants."""
    return f"model.layers.{layer}.{role}.{part}"


def qkv_biases(spec: ModelSpec, layer: int) -> list[str]:
    """Return the names of a layer's biases of queries, keys and values; empty if it has none."""
    roles = (QUERY, KEY, VALUE) if spec.has_qkv_bias else ()
    return [layer_tensor(layer, role, BIAS) for role in roles]


def output_bias(spec: ModelSpec, layer: int) -> list[str]:
    """Return the name of the bias of what attention gives, in a list; empty if there is none."""
    return [layer_tensor(layer, OUTPUT, BIAS)] if spec.has_all_biases else []


def sinks(spec: ModelSpec, layer: int) -> list[str]:
    """Return the name of the scores of query heads, in a list; empty if there are none."""
    return [layer_tensor(layer, SINKS)] if spec.has_sinks else []


def head_norms(spec: ModelSpec, layer: int) -> list[str]:
    """Return the names of a layer's norms of query and key heads; empty if it has none."""
    has_them = spec.has_head_norms and spec.recurrence_of(layer) is None
    roles = (QUERY_NORM, KEY_NORM) if has_them else ()
    return [layer_tensor(layer, role) for role in roles]


def mlp_roles(spec: ModelSpec) -> list[str]:
    """Return the roles of an MLP's matrices, in the order of use."""
    return [GATE, UP, DOWN] if spec.gates_mlps else [UP, DOWN]


def input_norms(spec: ModelSpec, layer: int) -> list[str]:
    """Return the names of the norms before mixer and MLP; those that there are."""
    if not spec.has_input_norms:
        return []
    roles = [ATTN_NORM] * spec.has_mixer(layer) + [MLP_NORM] * spec.has_mlp(layer)
    return [layer_tensor(layer, role) for role in roles]


def output_norms(spec: ModelSpec, layer: int) -> list[str]:
    """Return the names of the norms of what attention and MLP give; empty if there are none."""
    roles = (ATTN_OUTPUT_NORM, MLP_OUTPUT_NORM) if spec.has_output_norms else ()
    return [layer_tensor(layer, role) for role in roles]


def directory_name(spec: ModelSpec, canonical: str) -> str:
    """Return what a Hugging Face directory calls a canonical tensor."""
    if canonical == FINAL_NORM and spec.architecture in LAST_NORMS:
        return LAST_NORMS[spec.architecture][0]
    if canonical.endswith(f".{SINKS}.{WEIGHT}") and not spec.has_all_biases:
        return canonical.removesuffix(f".{WEIGHT}")
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
    name = GGUF_OTHER_NAMES.get(architecture, {}).get(role, GGUF_LAYER_NAMES[role])
    return f"blk.{layer}.{name}.{part}"


def is_left_out(spec: ModelSpec, name: str, *, in_gguf: bool) -> bool:
    """Tell whether a tensor of a file is of layers that predict ahead, which do not run."""
    if not ARCHITECTURES[spec.architecture].predicts_ahead:
        return False
    if name.startswith(AHEAD):
        return True
    layers, _, rest = name.partition("blk." if in_gguf else f"{PREFIX}layers.")
    number = rest.partition(".")[0]
    if layers or not number.isdecimal():
        return False
    return spec.num_layers <= int(number[:9]) < spec.num_layers + spec.layers_ahead


def gguf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a GGUF file's tensor, of vectors without a leading or trailing 1.

    Converters leave it to what had one in directories, and quantisers take it away.
    """
    if name.endswith(GGUF_OF_GROUPS) and len(shape) > 1:
        return (math.prod(shape),)
    if name.endswith(GGUF_VECTORS) and shape[:1] == (1,):
        return shape[1:]
    return shape[:1] if name.endswith(GGUF_COLUMNS) and shape[1:] == (1,) else shape


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor the model must have, canonical name to shape, in the order of use."""
    hidden = spec.hidden_size
    of_attention = {**_attention_shapes(spec), OUTPUT: (hidden, spec.attended_size)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        mixture, recurrence = spec.mixture_of(layer), spec.recurrence_of(layer)
        shapes |= dict.fromkeys(input_norms(spec, layer), (hidden,))
        if recurrence is not None:
            own = recurrence_layout.recurrence_shapes(spec, recurrence)
            shapes |= {f"{PREFIX}layers.{layer}.{name}": shape for name, shape in own.items()}
        attention = of_attention if recurrence is None and spec.has_mixer(layer) else {}
        feedforward = _feedforward_shapes(spec, mixture) if spec.has_mlp(layer) else {}
        for role, shape in (attention | feedforward).items():
            shapes[layer_tensor(layer, role)] = shape
        sizes = (spec.query_size, spec.kv_size, spec.kv_size)
        shapes |= {name: (n,) for name, n in zip(qkv_biases(spec, layer), sizes, strict=False)}
        shapes |= dict.fromkeys(output_bias(spec, layer), (hidden,))
        shapes |= dict.fromkeys(sinks(spec, layer), (spec.num_heads,))
        if mixture is not None:
            biases = expert_layout.bias_shapes(spec, mixture).items()
            shapes |= {layer_tensor(layer, role, BIAS): shape for role, shape in biases}
        shapes |= zip(head_norms(spec, layer), _head_norm_shapes(spec), strict=False)
        shapes |= dict.fromkeys(output_norms(spec, layer), (hidden,))
    shapes[FINAL_NORM] = (hidden,)
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, hidden)
    return shapes


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the roles and shapes of what a layer's attention has but for its output."""
    hidden = spec.hidden_size
    if spec.latents is not None:
        return latent_layout.latent_shapes(spec.latents, spec.num_heads, hidden)
    return {
        QUERY: (spec.query_size, hidden),
        KEY: (spec.kv_size, hidden),
        VALUE: (spec.kv_size, hidden),
        **({QUERY_GATE: (spec.query_size, hidden)} if spec.gates_attention else {}),
    }


def _head_norm_shapes(spec: ModelSpec) -> list[tuple[int]]:
    """Return the shapes of a layer's norms of query and key heads."""
    if spec.norms_heads_together:
        return [(spec.query_size,), (spec.kv_size,)]
    return [(spec.head_dim,)] * 2


def _feedforward_shapes(spec: ModelSpec, mixture: Mixture | None) -> dict[str, tuple[int, ...]]:
    """Return the roles and shapes of a layer's MLP, or of its mixture."""
    if mixture is not None:
        of_all = expert_layout.shared_shapes(spec, mixture)
        return expert_layout.mixture_shapes(spec, mixture) | of_all
    inner, hidden = spec.mlp_size, spec.hidden_size
    shapes = {GATE: (inner, hidden), UP: (inner, hidden), DOWN: (hidden, inner)}
    return {role: shapes[role] for role in mlp_roles(spec)}


def head_orders(spec: ModelSpec, *, turns_neighbours: bool) -> dict[str, IntArray]:
    """Return the order of rows in a head (`RawTensor.head_order`) where it is not the model's.

    By canonical name. The model turns element i of a head of D with element i + D/2. In files the
    elements that turn are the first R of a head, i with i + R/2, and the others lie behind them;
    where neighbours turn (`turns_neighbours`), 2i with 2i + 1. Scores are sums over the elements,
    whatever their order, if only it is the same of queries and keys.
    """
    size, turning = spec.head_dim, spec.num_turning
    if spec.latents is not None:
        orders = latent_layout.latent_orders(spec.latents) if turns_neighbours else {}
        return {
            layer_tensor(layer, role): order
            for layer in range(spec.num_layers)
            for role, order in orders.items()
        }
    if not turns_neighbours and turning == size:
        return {}
    first = np.arange(turning).reshape((-1, 2) if turns_neighbours else (2, -1))
    pairs = first.T if turns_neighbours else first
    order = np.concatenate([pairs, np.arange(turning, size).reshape(2, -1)], axis=1).reshape(-1)
    names = [(role, WEIGHT) for role in (QUERY, KEY)]
    names += [(role, BIAS) for role in (QUERY, KEY) if spec.has_qkv_bias]
    names += [(role, WEIGHT) for role in (QUERY_NORM, KEY_NORM) if spec.has_head_norms]
    return {
        layer_tensor(layer, role, part): order
        for layer in spec.attending_layers()
        for role, part in names
    }
