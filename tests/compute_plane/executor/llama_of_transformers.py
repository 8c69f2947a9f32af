"""The same tiny models in transformers: import this where it is used, it takes seconds."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from compute_plane.model.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.model.llama_weights import LlamaWeights, layer_fields

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def rope_parameters(spec: ModelSpec) -> dict[str, object]:
    """What a configuration says of the rotary positions."""
    scaling = spec.rope_scaling
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if isinstance(scaling, LinearScaling):
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_context_length,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    if isinstance(scaling, Llama3Scaling):
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    return rope


def transformers_model(spec: ModelSpec, weights: LlamaWeights) -> PreTrainedModel:
    make_config, make_model = CLASSES[spec.architecture]
    config = make_config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.rms_norm_eps,
        tie_word_embeddings=spec.tie_embeddings,
        rope_parameters=rope_parameters(spec),
        attn_implementation="eager",
    )
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.lm_head,
    }
    for index, layer in enumerate(weights.layers):
        for name, field in layer_fields(spec, index).items():
            state[name] = getattr(layer, field)
    model = make_model(config).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    return model
