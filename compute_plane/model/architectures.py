"""The architectures that run, and in what each differs from the others (ADR 0020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Activation: TypeAlias = Literal["silu", "gelu", "clamped", "relu2"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """In what one of the architectures differs from the others; all else they have in common.

    `title`: its name for people. `has_qkv_bias`: the products that give queries, keys and values
    have biases; `may_lack_qkv_bias`: unless a model has none. `has_head_norms`: every query and key
    head is normalised (RMSNorm, one weight for all query heads and one for all key heads of a
    layer) before it is rotated; `norms_heads_together`: not each by itself, but all query heads of
    a token as one row, and all its key heads; `may_lack_head_norms`: unless a model has none.
    `turns_neighbours`: in which files the rows of queries and keys lie so that neighbouring
    elements of a head turn together. `has_multipliers`: those of `compute_plane.model.multipliers`.
    `experts`: whether layers have a mixture of experts in place of one MLP. `has_output_norms`:
    what attention and MLP give is normalised before it is added to the hidden states;
    `has_input_norms`: what they read is normalised. `has_sinks`: query heads have a score each
    beside those of tokens (`kernels.reference.paged_attention`). `has_all_biases`: the products of
    what attention gives, of the router and of experts have biases as well. `activation`: what gates
    the MLP, SiLU, GELU (by tanh), or a clamped SwiGLU (`kernels.reference.clamped_mul`); or what
    stands in an MLP without a gate, relu(x)².
    `turns_in_windows`: of a model with windows no layer without one turns its heads.
    `norms_begin_at_one`: directories have weights of norms as what they are more than 1.
    `exceeds_float16`: hidden states, or their squares, are larger than a float16 can be.
    `says_scaled_length`: files say how many positions there are after RoPE scaling.
    `predicts_ahead`: files may have layers behind the last one that predict tokens further on,
    which are left out. `gates_attention`: what attention gives is multiplied by the sigmoid of a
    product of its own (in files its rows are behind each query head's). `norms_values`: value heads
    are normalised, without weights. `scales_layers`: what a layer gives is multiplied by a number
    of its own. `caps_scores`: scores have a cap, and logits. `attends_beside_states`: layers with
    a state have attention, too, which reads the same, and what both give is added. `is_in_gguf`:
    whether GGUF files know the name.
    """

    title: str
    has_qkv_bias: bool = False
    may_lack_qkv_bias: bool = False
    has_head_norms: bool = False
    norms_heads_together: bool = False
    may_lack_head_norms: bool = False
    turns_neighbours: Literal["never", "in GGUF", "always"] = "never"
    has_multipliers: bool = False
    experts: Literal["never", "may", "always"] = "never"
    has_output_norms: bool = False
    has_input_norms: bool = True
    has_sinks: bool = False
    has_all_biases: bool = False
    activation: Activation = "silu"
    turns_in_windows: bool = False
    norms_begin_at_one: bool = False
    exceeds_float16: bool = False
    says_scaled_length: bool = False
    predicts_ahead: bool = False
    gates_attention: bool = False
    norms_values: bool = False
    scales_layers: bool = False
    caps_scores: bool = False
    attends_beside_states: bool = False
    is_in_gguf: bool = True


ARCHITECTURES: Final = {
    "llama": Architecture("Llama", turns_neighbours="in GGUF", experts="may"),
    "mistral3": Architecture("Ministral 3", turns_neighbours="in GGUF"),
    "qwen2": Architecture("Qwen2", has_qkv_bias=True),
    "qwen2vl": Architecture("Qwen2-VL", has_qkv_bias=True),
    "qwen3": Architecture("Qwen3", has_head_norms=True),
    "qwen3vl": Architecture("Qwen3-VL", has_head_norms=True),
    "phi3": Architecture("Phi-3"),
    "glm4": Architecture(
        "GLM-4",
        has_qkv_bias=True,
        may_lack_qkv_bias=True,
        turns_neighbours="always",
        has_output_norms=True,
    ),
    "ernie4_5": Architecture("ERNIE 4.5", turns_neighbours="always"),
    "seed_oss": Architecture("Seed-OSS", has_qkv_bias=True, may_lack_qkv_bias=True),
    "exaone4": Architecture(
        "EXAONE 4",
        has_head_norms=True,
        has_output_norms=True,
        has_input_norms=False,
        turns_in_windows=True,
    ),
    "olmo2": Architecture(
        "OLMo 2",
        has_head_norms=True,
        norms_heads_together=True,
        has_output_norms=True,
        has_input_norms=False,
    ),
    "smollm3": Architecture("SmolLM3", turns_neighbours="in GGUF"),
    "granite": Architecture("Granite", turns_neighbours="in GGUF", has_multipliers=True),
    "gemma2": Architecture(
        "Gemma 2",
        has_output_norms=True,
        activation="gelu",
        norms_begin_at_one=True,
        exceeds_float16=True,
        caps_scores=True,
    ),
    "gemma3": Architecture(
        "Gemma 3",
        has_head_norms=True,
        has_output_norms=True,
        activation="gelu",
        norms_begin_at_one=True,
        exceeds_float16=True,
        says_scaled_length=True,
    ),
    "gemma4": Architecture(
        "Gemma 4",
        has_head_norms=True,
        has_output_norms=True,
        activation="gelu",
        exceeds_float16=True,
        says_scaled_length=True,
        norms_values=True,
        scales_layers=True,
        experts="may",
    ),
    "granitehybrid": Architecture(
        "Granite 4", turns_neighbours="in GGUF", has_multipliers=True, experts="may"
    ),
    "granite_swa": Architecture(
        "Granite with windows", turns_neighbours="in GGUF", has_multipliers=True, has_sinks=True
    ),
    "mixtral": Architecture("Mixtral", experts="always", is_in_gguf=False),
    "qwen3moe": Architecture("Qwen3 MoE", has_head_norms=True, experts="always"),
    "qwen3vlmoe": Architecture("Qwen3-VL MoE", has_head_norms=True, experts="always"),
    "qwen2moe": Architecture("Qwen2 MoE", has_qkv_bias=True, experts="always"),
    "glm4moe": Architecture(
        "GLM-4.5",
        has_qkv_bias=True,
        may_lack_qkv_bias=True,
        has_head_norms=True,
        may_lack_head_norms=True,
        experts="always",
        predicts_ahead=True,
    ),
    "ernie4_5-moe": Architecture(
        "ERNIE 4.5 MoE", turns_neighbours="always", experts="always", predicts_ahead=True
    ),
    "dots1": Architecture("dots.llm1", has_head_norms=True, experts="always"),
    "exaone-moe": Architecture(
        "K-EXAONE",
        has_head_norms=True,
        experts="always",
        turns_in_windows=True,
        predicts_ahead=True,
    ),
    "olmoe": Architecture(
        "OLMoE", has_head_norms=True, norms_heads_together=True, experts="always"
    ),
    "minimax-m2": Architecture(
        "MiniMax-M2", has_head_norms=True, norms_heads_together=True, experts="always"
    ),
    "gpt-oss": Architecture(
        "gpt-oss",
        has_qkv_bias=True,
        has_sinks=True,
        has_all_biases=True,
        activation="clamped",
        experts="always",
        exceeds_float16=True,
    ),
    "qwen3next": Architecture(
        "Qwen3-Next",
        has_head_norms=True,
        norms_begin_at_one=True,
        gates_attention=True,
        predicts_ahead=True,
        experts="always",
    ),
    "qwen35": Architecture(
        "Qwen3.5",
        has_head_norms=True,
        norms_begin_at_one=True,
        gates_attention=True,
        predicts_ahead=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3.5 MoE",
        has_head_norms=True,
        norms_begin_at_one=True,
        gates_attention=True,
        predicts_ahead=True,
        experts="always",
    ),
    "falcon-h1": Architecture("Falcon-H1", attends_beside_states=True),
    "lfm2": Architecture("LFM2", has_head_norms=True),
    "lfm2moe": Architecture("LFM2 MoE", has_head_norms=True, experts="always"),
    "nemotron_h": Architecture(
        "Nemotron-H", activation="relu2", experts="may", predicts_ahead=True, exceeds_float16=True
    ),
    "nemotron_h_moe": Architecture(
        "Nemotron-H MoE",
        activation="relu2",
        experts="always",
        predicts_ahead=True,
        exceeds_float16=True,
    ),
    "deepseek2": Architecture(
        "DeepSeek",
        turns_neighbours="always",
        experts="may",
        predicts_ahead=True,
        exceeds_float16=True,
    ),
    "granitemoe": Architecture(
        "Granite MoE", turns_neighbours="in GGUF", has_multipliers=True, experts="always"
    ),
}
"""By the names that GGUF files have for them, where they have one: a Mixtral is a Llama there."""
