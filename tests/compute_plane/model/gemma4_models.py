"""Tiny Gemma 4, as directories and as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

KINDS = {"S": "sliding_attention", "F": "full_attention"}
OF_ATTENTION = ("k_proj", "v_proj", "k_norm")


@dataclass
class Gemma4Model(TinyModel):
    """A letter of `pattern` for each layer: with a window, or without.

    `num_sharing`: how many layers read an earlier one's keys and values; `input_size`: P.
    """

    architecture: str = "gemma4"
    pattern: str = "SFSF"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    global_kv_heads: int | None = None
    global_head_dim: int = 32
    num_sharing: int = 0
    is_double: bool = False
    input_size: int = 0
    window: int = 8
    cap: float | None = None
    keys_are_values: bool = False
    has_experts: bool = False
    expert_size: int = 32
    num_experts: int = 5
    is_fused: bool = True

    def __post_init__(self) -> None:
        self.num_layers = len(self.pattern)
        rng = np.random.default_rng(self.seed)
        hidden, size = self.hidden_size, self.input_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        if size:
            width = self.num_layers * size
            shapes |= {
                "model.embed_tokens_per_layer.weight": (len(TOKENS), width),
                "model.per_layer_model_projection.weight": (width, hidden),
                "model.per_layer_projection_norm.weight": (size,),
            }
        for layer in range(self.num_layers):
            own = self._layer_shapes(layer)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (len(TOKENS), hidden)
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }
        for name, values in self.weights.items():
            if name.endswith("layer_scalar"):
                values[:] = rng.uniform(0.4, 1.3)

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, size = self.hidden_size, self.input_size
        is_global, shares = self.pattern[layer] == "F", self.shares(layer)
        dim = self.global_head_dim if is_global else self.head_dim
        kv_heads = self.num_kv_heads
        if is_global and self.global_kv_heads is not None:
            kv_heads = self.global_kv_heads
        inner = self.intermediate_size * (2 if shares and self.is_double else 1)
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (self.num_heads * dim, hidden),
            "self_attn.k_proj.weight": (kv_heads * dim, hidden),
            "self_attn.v_proj.weight": (kv_heads * dim, hidden),
            "self_attn.o_proj.weight": (hidden, self.num_heads * dim),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "layer_scalar": (1,),
        }
        if self.has_experts:
            count, wide = self.num_experts, self.expert_size
            shapes |= {
                "router.proj.weight": (count, hidden),
                "router.scale": (hidden,),
                "router.per_expert_scale": (count,),
                "experts.gate_up_proj": (count, 2 * wide, hidden),
                "experts.down_proj": (count, hidden, wide),
                "pre_feedforward_layernorm_2.weight": (hidden,),
                "post_feedforward_layernorm_1.weight": (hidden,),
                "post_feedforward_layernorm_2.weight": (hidden,),
            }
        if is_global and self.keys_are_values:
            del shapes["self_attn.v_proj.weight"]
        norms = "input", "post_attention", "pre_feedforward", "post_feedforward"
        shapes |= {f"{name}_layernorm.weight": (hidden,) for name in norms}
        if size:
            shapes |= {
                "per_layer_input_gate.weight": (size, hidden),
                "per_layer_projection.weight": (hidden, size),
                "post_per_layer_input_norm.weight": (hidden,),
            }
        return shapes

    def shares(self, layer: int) -> bool:
        """Whether a layer reads an earlier one's keys and values."""
        return layer >= self.num_layers - self.num_sharing

    def config(self) -> dict[str, Any]:
        config = super().config() | {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "layer_types": [KINDS[letter] for letter in self.pattern],
            "sliding_window": self.window,
            "global_head_dim": self.global_head_dim,
            "num_global_key_value_heads": self.global_kv_heads,
            "attention_k_eq_v": self.keys_are_values,
            "num_kv_shared_layers": self.num_sharing,
            "use_double_wide_mlp": self.is_double,
            "hidden_size_per_layer_input": self.input_size,
            "vocab_size_per_layer_input": len(TOKENS),
            "final_logit_softcapping": self.cap,
            "hidden_activation": "gelu_pytorch_tanh",
            "pad_token_id": 0,
            "enable_moe_block": self.has_experts,
            "num_experts": self.num_experts,
            "top_k_experts": 2,
            "moe_intermediate_size": self.expert_size,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 300.0,
                    "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        }
        del config["rope_theta"]
        return config

    @property
    def kv_heads_in_gguf(self) -> int | list[int]:
        if self.global_kv_heads is None:
            return self.num_kv_heads
        return [
            self.global_kv_heads if letter == "F" else self.num_kv_heads for letter in self.pattern
        ]

    def own_keys(self) -> dict[str, Any]:
        sizes = {"": self.global_head_dim, "_swa": self.head_dim}
        names = "attention.key_length", "attention.value_length", "rope.dimension_count"
        own: dict[str, Any] = {
            f"{name}{kind}": size for name in names for kind, size in sizes.items()
        }
        own |= {
            "rope.freq_base": 300.0,
            "rope.freq_base_swa": 20.0,
            "attention.sliding_window": self.window,
            "attention.sliding_window_pattern": [letter == "S" for letter in self.pattern],
            "attention.shared_kv_layers": self.num_sharing,
            "embedding_length_per_layer_input": self.input_size,
        }
        if self.is_double:
            width = self.intermediate_size
            own["feed_forward_length"] = [
                width * (2 if self.shares(layer) else 1) for layer in range(self.num_layers)
            ]
        if self.has_experts:
            own |= {
                "expert_count": self.num_experts,
                "expert_used_count": 2,
                "expert_feed_forward_length": self.expert_size,
            }
        if self.cap is not None:
            own["final_logit_softcapping"] = self.cap
        return own

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        return {
            name: values
            for name, values in self.weights.items()
            if ".router." not in name and ".experts." not in name
        }

    def experts_in_gguf(self) -> dict[str, np.ndarray]:
        names = {
            "router.proj.weight": "ffn_gate_inp.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "experts.down_proj": "ffn_down_exps.weight",
        }
        found = {}
        for name, values in self.weights.items():
            parts = name.split(".", 3)
            if parts[-1] not in names:
                continue
            stem = f"blk.{parts[2]}."
            if parts[-1] == "experts.gate_up_proj" and not self.is_fused:
                gates, ups = np.split(values, 2, axis=1)
                found[f"{stem}ffn_gate_exps.weight"] = gates
                found[f"{stem}ffn_up_exps.weight"] = ups
            else:
                found[stem + names[parts[-1]]] = values
        return found

    def divisors_in_gguf(self) -> dict[str, list[float]]:
        """Return the tensor that says which pairs of layers without windows turn."""
        pairs = self.global_head_dim // 2
        return {"rope_freqs.weight": [1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4)}
