"""Tiny LFM2, as directories and as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

IN_GGUF = {"lfm2": "lfm2", "lfm2_moe": "lfm2moe"}
CLASSES = {"lfm2": "Lfm2ForCausalLM", "lfm2_moe": "Lfm2MoeForCausalLM"}
EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


@dataclass
class Lfm2Model(TinyModel):
    """One of `IN_GGUF`; layers 1 and 3 attend, the first ones of a mixture have one MLP."""

    num_layers: int = 4
    architecture: str = "lfm2"
    kernel_size: int = 3
    dense_layers: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        hidden = self.hidden_size
        if self.architecture == "lfm2_moe":
            self.dense_layers = self.dense_layers or 1
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            own = self._attention_shapes() if self.attends(layer) else self._mixer_shapes()
            own |= self._feedforward_shapes(layer)
            own |= dict.fromkeys(("operator_norm.weight", "ffn_norm.weight"), (hidden,))
            shapes |= {prefix + name: shape for name, shape in own.items()}
        shapes["model.embedding_norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (len(TOKENS), hidden)
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }

    @staticmethod
    def attends(layer: int) -> bool:
        """Whether a layer has attention."""
        return layer % 2 == 1

    @property
    def has_experts(self) -> bool:
        """Whether layers have a mixture."""
        return self.architecture == "lfm2_moe"

    def _mixer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, self.kernel_size),
            "conv.out_proj.weight": (hidden, hidden),
        }

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (query, self.hidden_size),
            "k_proj.weight": (kv, self.hidden_size),
            "v_proj.weight": (kv, self.hidden_size),
            "out_proj.weight": (self.hidden_size, query),
            "q_layernorm.weight": (self.head_dim,),
            "k_layernorm.weight": (self.head_dim,),
        }
        return {f"self_attn.{name}": shape for name, shape in own.items()}

    def _feedforward_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        if self.has_experts and layer < self.dense_layers:
            inner = self.dense_size
        parts = {"w1.weight": (inner, hidden), "w3.weight": (inner, hidden)}
        parts["w2.weight"] = (hidden, inner)
        if not self.has_experts or layer < self.dense_layers:
            return {f"feed_forward.{name}": shape for name, shape in parts.items()}
        own: dict[str, tuple[int, ...]] = {
            f"experts.{expert}.{name}": shape
            for expert in range(self.num_experts)
            for name, shape in parts.items()
        }
        own |= {
            "gate.weight": (self.num_experts, hidden),
            "expert_bias": (self.num_experts,),
        }
        return {f"feed_forward.{name}": shape for name, shape in own.items()}

    def config(self) -> dict[str, Any]:
        config = super().config() | {
            "architectures": [CLASSES[self.architecture]],
            "norm_eps": 1e-5,
            "conv_L_cache": self.kernel_size,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "layer_types": [
                "full_attention" if self.attends(layer) else "conv"
                for layer in range(self.num_layers)
            ],
        }
        del config["rms_norm_eps"]
        if self.has_experts:
            config |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": 2,
                "num_dense_layers": self.dense_layers,
                "moe_intermediate_size": self.intermediate_size,
                "intermediate_size": self.dense_size,
                "norm_topk_prob": True,
                "use_expert_bias": True,
                "routed_scaling_factor": 1.0,
            }
        return config

    @property
    def in_gguf(self) -> str:
        return IN_GGUF[self.architecture]

    @property
    def kv_heads_in_gguf(self) -> list[int]:
        layers = range(self.num_layers)
        return [self.num_kv_heads if self.attends(layer) else 0 for layer in layers]

    def own_keys(self) -> dict[str, Any]:
        own: dict[str, Any] = {"shortconv.l_cache": self.kernel_size}
        if self.has_experts:
            own |= {
                "expert_count": self.num_experts,
                "expert_used_count": 2,
                "expert_feed_forward_length": self.intermediate_size,
                "leading_dense_block_count": self.dense_layers,
                "expert_gating_func": 2,
            }
        return own

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        return {
            name: values[:, 0] if name.endswith("conv.conv.weight") else values
            for name, values in self.weights.items()
            if ".experts." not in name
        }

    def experts_in_gguf(self) -> dict[str, np.ndarray]:
        """Return experts by the file's names, those of a layer in one."""
        found: dict[str, list[np.ndarray]] = {}
        for name, values in self.weights.items():
            if ".experts." in name:
                layer, part = name.split(".")[2], EXPERTS[name.split(".")[-2]]
                found.setdefault(f"blk.{layer}.{part}.weight", []).append(values)
        return {name: np.stack(values) for name, values in found.items()}
