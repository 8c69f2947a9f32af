"""Which tensors a model has, what shape each has, and what GGUF calls them (`stored_names`).

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
  Its GGUF files, Seed-OSS's, GLM-4.5's and Qwen3.5's call the norm before the MLP post_attention_norm (`stored_names`), its
  directories have other names for all but plain matrices (`stacked_experts`).
  Gemma 3, GLM-4 and, in the place of the norms before attention and MLP, EXAONE 4 and OLMo 2 have:
    model.layers.N.self_attn.output_norm.weight      blk.N.post_attention_norm.weight   [hidden]
    model.layers.N.mlp.output_norm.weight            blk.N.post_ffw_norm.weight         [hidden]
  In their directories these (of Gemma the norm before the MLP, too) have names of their own (`stored_names`).
  Gemma 4 has besides (in directories layer_scalar), D and G by layer (`ModelSpec.heads_of`), and `layer_inputs_layout`:
    model.layers.N.layer_scalar.weight               blk.N.layer_output_scale.weight  [1]
  Files of Phi-3 have in place of q, k and v, and (GLM-4's, too) of gate and up, their rows in this order:
    model.layers.N.self_attn.qkv_proj.weight         blk.N.attn_qkv.weight     [(H + 2·G)·D, hidden]
    model.layers.N.mlp.gate_up_proj.weight           blk.N.ffn_up.weight       [2·intermediate, hidden]
  Directories of Granite 4 have in place of gate and up, and of down, without experts of the MLP, else of the shared one:
    model.layers.N.shared_mlp.input_linear.weight                              [2·intermediate, hidden]
    model.layers.N.shared_mlp.output_linear.weight                             [hidden, intermediate]
  Of layers behind the last one, which predict ahead, nothing is used (`stored_names.is_left_out`).
  Mixtures of experts have a router and experts in place of the MLP (`expert_layout`). Qwen3.5, Qwen3-Next, LFM2 and Granite 4
  have something else in place of attention in most layers (`recurrence_layout`), Qwen's gates in the others (`delta_net_layout`).
  Falcon-H1 has Mamba-2 beside attention in all. DeepSeek's layers have something else for q, k and v: `latent_layout`.
  LFM2's directories have other names for nearly everything (`stored_names`), its files for the last norm; Falcon-H1's for MLPs.
"""  # noqa: E501 - a table

from __future__ import annotations

import numpy as np

from compute_plane.model import (
    delta_net_layout,
    expert_layout,
    latent_layout,
    layer_inputs_layout,
    recurrence_layout,
)
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
LAYER_SCALE = "layer_scalar"
QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
WEIGHT = "weight"
BIAS = "bias"


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
    """Return the names of a layer's norms of query and key heads; empty if it has none.

    Of queries alone where keys are an earlier layer's.
    """
    if not spec.has_head_norms or not spec.attends(layer):
        return []
    roles = [QUERY_NORM, KEY_NORM] if spec.kv_source_of(layer) == layer else [QUERY_NORM]
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


def layer_scale(spec: ModelSpec, layer: int) -> list[str]:
    """Return the name of what a layer's output is multiplied by, in a list; empty if nothing."""
    return [layer_tensor(layer, LAYER_SCALE)] if spec.scales_layers else []


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor the model must have, canonical name to shape, in the order of use."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    shapes |= layer_inputs_layout.global_shapes(spec)
    for layer in range(spec.num_layers):
        mixture, recurrence = spec.mixture_of(layer), spec.recurrence_of(layer)
        shapes |= dict.fromkeys(input_norms(spec, layer), (hidden,))
        if recurrence is not None:
            own = recurrence_layout.recurrence_shapes(spec, recurrence)
            shapes |= {f"{PREFIX}layers.{layer}.{name}": shape for name, shape in own.items()}
        attention = _attention_shapes(spec, layer) if spec.attends(layer) else {}
        feedforward = _feedforward_shapes(spec, layer, mixture) if spec.has_mlp(layer) else {}
        for role, shape in (attention | feedforward).items():
            shapes[layer_tensor(layer, role)] = shape
        sizes = (spec.query_size, spec.kv_size, spec.kv_size)
        shapes |= {name: (n,) for name, n in zip(qkv_biases(spec, layer), sizes, strict=False)}
        shapes |= dict.fromkeys(output_bias(spec, layer), (hidden,))
        shapes |= dict.fromkeys(sinks(spec, layer), (spec.num_heads,))
        if mixture is not None:
            biases = expert_layout.bias_shapes(spec, mixture).items()
            shapes |= {layer_tensor(layer, role, BIAS): shape for role, shape in biases}
            vectors = expert_layout.own_norm_shapes(spec, mixture).items()
            shapes |= {f"{PREFIX}layers.{layer}.{name}": shape for name, shape in vectors}
        shapes |= zip(head_norms(spec, layer), _head_norm_shapes(spec, layer), strict=False)
        shapes |= dict.fromkeys(output_norms(spec, layer), (hidden,))
        shapes |= {
            layer_tensor(layer, role): shape
            for role, shape in layer_inputs_layout.layer_shapes(spec).items()
        }
        shapes |= dict.fromkeys(layer_scale(spec, layer), (1,))
    shapes[FINAL_NORM] = (hidden,)
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, hidden)
    return shapes


def _attention_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the roles and shapes of the matrices of a layer's attention."""
    hidden = spec.hidden_size
    if spec.latents is not None:
        own = latent_layout.latent_shapes(spec.latents, spec.num_heads, hidden)
        return {**own, OUTPUT: (hidden, spec.attended_size)}
    heads = spec.heads_of(layer)
    shapes: dict[str, tuple[int, ...]] = {QUERY: (heads.query_size, hidden)}
    if spec.kv_source_of(layer) == layer:
        shapes |= dict.fromkeys((KEY, VALUE), (heads.kv_size, hidden))
    if spec.gates_attention:
        shapes[QUERY_GATE] = (heads.query_size, hidden)
    return {**shapes, OUTPUT: (hidden, heads.query_size)}


def _head_norm_shapes(spec: ModelSpec, layer: int) -> list[tuple[int]]:
    """Return the shapes of a layer's norms of query and key heads."""
    heads = spec.heads_of(layer)
    if spec.norms_heads_together:
        return [(heads.query_size,), (heads.kv_size,)]
    return [(heads.head_dim,)] * 2


def _feedforward_shapes(
    spec: ModelSpec, layer: int, mixture: Mixture | None
) -> dict[str, tuple[int, ...]]:
    """Return the roles and shapes of a layer's MLP, or of its mixture."""
    if mixture is not None:
        of_all = expert_layout.shared_shapes(spec, mixture)
        return expert_layout.mixture_shapes(spec, mixture) | of_all
    inner, hidden = spec.mlp_size_of(layer), spec.hidden_size
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
