"""Tiny Nemotron-H, as directories and as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@dataclass
class NemotronModel(TinyModel):
    """A letter of `pattern` for each layer."""

    architecture: str = "nemotron_h"
    pattern: str = "M-M*-"
    shared_size: int = 48
    mamba_heads: int = 4
    mamba_head_dim: int = 32
    groups: int = 2
    state_size: int = 64
    kernel_size: int = 4

    def __post_init__(self) -> None:
        self.num_layers = len(self.pattern)
        rng = np.random.default_rng(self.seed)
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (len(TOKENS), hidden)}
        for layer, kind in enumerate(self.pattern):
            prefix = f"backbone.layers.{layer}."
            shapes[f"{prefix}norm.weight"] = (hidden,)
            own = self._shapes_of(kind)
            shapes |= {f"{prefix}mixer.{name}": shape for name, shape in own.items()}
        shapes["backbone.norm_f.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (len(TOKENS), hidden)
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return "E" in self.pattern

    @property
    def inner_size(self) -> int:
        """Width of all heads of Mamba-2."""
        return self.mamba_heads * self.mamba_head_dim

    def _shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        hidden, inner, wide = self.hidden_size, self.inner_size, self.intermediate_size
        if kind == "*":
            query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            return {
                "q_proj.weight": (query, hidden),
                "k_proj.weight": (kv, hidden),
                "v_proj.weight": (kv, hidden),
                "o_proj.weight": (hidden, query),
            }
        if kind == "-":
            return {"up_proj.weight": (wide, hidden), "down_proj.weight": (hidden, wide)}
        if kind == "M":
            channels, heads = inner + 2 * self.groups * self.state_size, self.mamba_heads
            return {
                "in_proj.weight": (inner + channels + heads, hidden),
                "conv1d.weight": (channels, 1, self.kernel_size),
                "conv1d.bias": (channels,),
                **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
                "norm.weight": (inner,),
                "out_proj.weight": (hidden, inner),
            }
        found: dict[str, tuple[int, ...]] = {
            "gate.weight": (self.num_experts, hidden),
            "gate.e_score_correction_bias": (self.num_experts,),
            "shared_experts.up_proj.weight": (self.shared_size, hidden),
            "shared_experts.down_proj.weight": (hidden, self.shared_size),
        }
        for expert in range(self.num_experts):
            found[f"experts.{expert}.up_proj.weight"] = (wide, hidden)
            found[f"experts.{expert}.down_proj.weight"] = (hidden, wide)
        return found

    def config(self) -> dict[str, Any]:
        config = super().config() | {
            "architectures": ["NemotronHForCausalLM"],
            "layers_block_type": [KINDS[letter] for letter in self.pattern],
            "layer_norm_epsilon": 1e-5,
            "mamba_num_heads": self.mamba_heads,
            "mamba_head_dim": self.mamba_head_dim,
            "n_groups": self.groups,
            "ssm_state_size": self.state_size,
            "conv_kernel": self.kernel_size,
            "chunk_size": 16,
            "pad_token_id": 0,
        }
        if self.has_experts:
            config |= {
                "n_routed_experts": self.num_experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": self.intermediate_size,
                "moe_shared_expert_intermediate_size": self.shared_size,
                "routed_scaling_factor": 1.75,
            }
        return config

    @property
    def in_gguf(self) -> str:
        return "nemotron_h_moe" if self.has_experts else "nemotron_h"

    @property
    def kv_heads_in_gguf(self) -> list[int]:
        return [self.num_kv_heads if letter == "*" else 0 for letter in self.pattern]

    def own_keys(self) -> dict[str, Any]:
        widths = [self.intermediate_size if letter in "-E" else 0 for letter in self.pattern]
        own: dict[str, Any] = {
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": widths,
            "ssm.conv_kernel": self.kernel_size,
            "ssm.state_size": self.state_size,
            "ssm.group_count": self.groups,
            "ssm.inner_size": self.inner_size,
            "ssm.time_step_rank": self.mamba_heads,
        }
        if self.has_experts:
            own |= {
                "expert_count": self.num_experts,
                "expert_used_count": 2,
                "expert_shared_count": 1,
                "expert_feed_forward_length": self.intermediate_size,
                "expert_shared_feed_forward_length": self.shared_size,
                "expert_weights_norm": True,
                "expert_weights_scale": 1.75,
            }
        return own

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        """Return the weights of no experts, by the names of other models."""
        found = {}
        for name, values in self.weights.items():
            parts = name.split(".")
            layer, part = ".".join(parts[:3]).replace("backbone", "model"), ".".join(parts[4:])
            if parts[1] == "embeddings":
                found["model.embed_tokens.weight"] = values
            elif parts[1] == "norm_f":
                found["model.norm.weight"] = values
            elif name == "lm_head.weight":
                found[name] = values
            elif parts[3] == "norm":
                found[f"{layer}.input_layernorm.weight"] = values
            elif parts[4] in ATTENTION:
                found[f"{layer}.self_attn.{part}"] = values
            elif self.pattern[int(parts[2])] == "-":
                found[f"{layer}.mlp.{part}"] = values
            elif self.pattern[int(parts[2])] == "M":
                found[f"{layer}.mamba.{part}"] = self._mixer_in_gguf(part, values)
        return found

    def _mixer_in_gguf(self, part: str, values: np.ndarray) -> np.ndarray:
        if part == "A_log":
            return -np.exp(values)[:, None]
        if part == "D":
            return values[:, None]
        if part == "norm.weight":
            return values.reshape(self.groups, -1)
        return values[:, 0] if part == "conv1d.weight" else values

    def experts_in_gguf(self) -> dict[str, np.ndarray]:
        """Return routers and experts by the file's names."""
        found: dict[str, list[np.ndarray]] = {}
        for name, values in self.weights.items():
            parts = name.split(".")
            if parts[1] != "layers" or self.pattern[int(parts[2])] != "E" or parts[3] == "norm":
                continue
            stem, role = f"blk.{parts[2]}.", parts[-2].removesuffix("_proj")
            if parts[-1] == "e_score_correction_bias":
                found[f"{stem}exp_probs_b.bias"] = [values]
            elif parts[4] == "gate":
                found[f"{stem}ffn_gate_inp.weight"] = [values]
            elif parts[4] == "shared_experts":
                found[f"{stem}ffn_{role}_shexp.weight"] = [values]
            else:
                found.setdefault(f"{stem}ffn_{role}_exps.weight", []).append(values)
        return {name: np.stack(v) if "exps" in name else v[0] for name, v in found.items()}
