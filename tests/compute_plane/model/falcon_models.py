"""Tiny Falcon-H1, as directories and as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

MULTIPLIERS = {
    "embedding_multiplier": 5.656854249492381,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.390625,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9375,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.4375,
    "ssm_multipliers": [0.75, 0.25, 0.375, 0.5, 0.3125],
    "mlp_multipliers": [0.8125, 0.375],
}
"""Such as published models have; of no two parts the same."""
PARTS = {"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm"}


@dataclass
class FalconModel(TinyModel):
    """All layers have Mamba-2 beside attention."""

    architecture: str = "falcon_h1"
    num_layers: int = 3
    head_dim: int = 32
    mamba_heads: int = 6
    mamba_head_dim: int = 32
    groups: int = 2
    state_size: int = 64
    kernel_size: int = 4
    has_norm: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        hidden, inner, wide = self.hidden_size, self.inner_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        channels, heads = inner + 2 * self.groups * self.state_size, self.mamba_heads
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "mamba.in_proj.weight": (inner + channels + heads, hidden),
            "mamba.conv1d.weight": (channels, 1, self.kernel_size),
            "mamba.conv1d.bias": (channels,),
            **dict.fromkeys(("mamba.A_log", "mamba.dt_bias", "mamba.D"), (heads,)),
            "mamba.out_proj.weight": (hidden, inner),
            "pre_ff_layernorm.weight": (hidden,),
            "feed_forward.gate_proj.weight": (wide, hidden),
            "feed_forward.up_proj.weight": (wide, hidden),
            "feed_forward.down_proj.weight": (hidden, wide),
        }
        if self.has_norm:
            own["mamba.norm.weight"] = (inner,)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
        shapes["model.final_layernorm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (len(TOKENS), hidden)
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }

    @property
    def inner_size(self) -> int:
        """Width of all heads of Mamba-2."""
        return self.mamba_heads * self.mamba_head_dim

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["FalconH1ForCausalLM"],
            "mamba_d_ssm": self.inner_size,
            "mamba_n_heads": self.mamba_heads,
            "mamba_d_head": self.mamba_head_dim,
            "mamba_n_groups": self.groups,
            "mamba_d_state": self.state_size,
            "mamba_d_conv": self.kernel_size,
            "mamba_chunk_size": 16,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_rms_norm": self.has_norm,
            "mamba_norm_before_gate": False,
            "projectors_bias": False,
            "rope_theta": 1e11,
            "pad_token_id": 0,
            **MULTIPLIERS,
        }

    @property
    def in_gguf(self) -> str:
        return "falcon-h1"

    def own_keys(self) -> dict[str, Any]:
        return {
            "rope.freq_base": 1e11,
            "ssm.conv_kernel": self.kernel_size,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.groups,
            "ssm.inner_size": self.inner_size,
            "ssm.time_step_rank": self.mamba_heads,
        }

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        """Return the weights by the names of other models, with the multipliers in them."""
        found = {}
        for name, values in self.weights.items():
            for own, other in PARTS.items():
                name = name.replace(own, other)
            found[name.replace("final_layernorm", "norm")] = self._in_gguf(name, values)
        return found

    def _in_gguf(self, name: str, values: np.ndarray) -> np.ndarray:
        of = MULTIPLIERS
        read, (gate, down) = of["attention_in_multiplier"], of["mlp_multipliers"]
        factors = {
            "embed_tokens.weight": of["embedding_multiplier"],
            "lm_head.weight": of["lm_head_multiplier"],
            "q_proj.weight": read,
            "k_proj.weight": read * of["key_multiplier"],
            "v_proj.weight": read,
            "o_proj.weight": of["attention_out_multiplier"],
            "mamba.out_proj.weight": of["ssm_out_multiplier"],
            "gate_proj.weight": gate,
            "down_proj.weight": down,
        }
        for part, factor in factors.items():
            if name.endswith(part) and not ("mamba" in name and part == "o_proj.weight"):
                return values * np.float32(factor)
        if name.endswith("in_proj.weight"):
            inner, size = self.inner_size, self.groups * self.state_size
            rows = np.repeat(of["ssm_multipliers"], (inner, inner, size, size, self.mamba_heads))
            return (values * (rows * of["ssm_in_multiplier"])[:, None]).astype(np.float32)
        if name.endswith("A_log"):
            return -np.exp(values)[:, None]
        if name.endswith("mamba.D"):
            return values[:, None]
        if name.endswith("mamba.norm.weight"):
            return values.reshape(self.groups, -1)
        return values[:, 0] if name.endswith("conv1d.weight") else values
