"""Tiny Granite 4 with Mamba-2, as directories and as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
KEYS = {
    "embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 1.5,
}  # fmt: skip
PARTS = {"input_linear": ("gate", "up"), "output_linear": ("down",)}


@dataclass
class Granite4Model(TinyModel):
    """Layers 1 and 3 attend, without rotary positions; `num_experts` 0: none have experts."""

    num_layers: int = 4
    architecture: str = "granitemoehybrid"
    num_experts: int = 0
    shared_size: int = 48
    mamba_heads: int = 4
    state_size: int = 64
    kernel_size: int = 4

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            own = self._attention_shapes() if self.attends(layer) else self._mixer_shapes()
            own |= self._feedforward_shapes(layer)
            norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
            own |= dict.fromkeys(norms, (hidden,))
            shapes |= {prefix + name: shape for name, shape in own.items()}
        shapes["model.norm.weight"] = (hidden,)
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
    def inner_size(self) -> int:
        """Width of all heads of Mamba-2."""
        return 2 * self.hidden_size

    @property
    def channels(self) -> int:
        """What goes through the convolution."""
        return self.inner_size + 2 * self.state_size

    def _mixer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner, heads = self.hidden_size, self.inner_size, self.mamba_heads
        own: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (inner + self.channels + heads, hidden),
            "conv1d.weight": (self.channels, 1, self.kernel_size),
            "conv1d.bias": (self.channels,),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "D": (heads,),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        }
        return {f"mamba.{name}": shape for name, shape in own.items()}

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own = {
            "q_proj.weight": (query, self.hidden_size),
            "k_proj.weight": (kv, self.hidden_size),
            "v_proj.weight": (kv, self.hidden_size),
            "o_proj.weight": (self.hidden_size, query),
        }
        return {f"self_attn.{name}": shape for name, shape in own.items()}

    def _feedforward_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        hidden, inner, count = self.hidden_size, self.intermediate_size, self.num_experts
        shared = self.shared_size if count else inner
        own: dict[str, tuple[int, ...]] = {
            "shared_mlp.input_linear.weight": (2 * shared, hidden),
            "shared_mlp.output_linear.weight": (hidden, shared),
        }
        if count:
            own |= {
                "block_sparse_moe.router.layer.weight": (count, hidden),
                "block_sparse_moe.input_linear.weight": (count, 2 * inner, hidden),
                "block_sparse_moe.output_linear.weight": (count, hidden, inner),
            }
        return own

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "intermediate_size": self.intermediate_size,
            "shared_intermediate_size": (
                self.shared_size if self.num_experts else self.intermediate_size
            ),
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": 2 if self.num_experts else 0,
            "layer_types": [
                "attention" if self.attends(layer) else "mamba" for layer in range(self.num_layers)
            ],
            "position_embedding_type": "nope",
            "mamba_n_heads": self.mamba_heads,
            "mamba_n_groups": 1,
            "mamba_d_state": self.state_size,
            "mamba_d_head": self.inner_size // self.mamba_heads,
            "mamba_d_conv": self.kernel_size,
            "mamba_expand": 2,
            "mamba_chunk_size": 16,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            **MULTIPLIERS,
        }

    @property
    def in_gguf(self) -> str:
        return "granitehybrid"

    @property
    def kv_heads_in_gguf(self) -> list[int]:
        layers = range(self.num_layers)
        return [self.num_kv_heads if self.attends(layer) else 0 for layer in layers]

    def own_keys(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "ssm.conv_kernel": self.kernel_size,
            "ssm.state_size": self.state_size,
            "ssm.group_count": 1,
            "ssm.inner_size": self.inner_size,
            "ssm.time_step_rank": self.mamba_heads,
            "rope.scaling.finetuned": False,
            **KEYS,
        }
        if self.num_experts:
            own |= {
                "expert_count": self.num_experts,
                "expert_used_count": 2,
                "expert_shared_feed_forward_length": self.shared_size,
            }
        return own

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        found = {}
        for name, values in self.weights.items():
            prefix, _, part = name.partition("shared_mlp.")
            if ".block_sparse_moe." in name:
                continue
            if part:
                module = "shared" if self.num_experts else "mlp"
                roles = PARTS[part.removesuffix(".weight")]
                for role, rows in zip(roles, np.split(values, len(roles)), strict=True):
                    found[f"{prefix}{module}.{role}_proj.weight"] = rows
            elif name.endswith("A_log"):
                found[name] = -np.exp(values)[:, None]
            elif name.endswith("mamba.D"):
                found[name] = values[:, None]
            elif name.endswith("mamba.norm.weight"):
                found[name] = values[None]
            elif name.endswith("conv1d.weight"):
                found[name] = values[:, 0]
            else:
                found[name] = values
        return found

    def experts_in_gguf(self) -> dict[str, np.ndarray]:
        """Return routers and experts by the file's names."""
        found = {}
        for name, values in self.weights.items():
            part = name.partition(".block_sparse_moe.")[2]
            if not part:
                continue
            stem = f"blk.{name.split('.')[2]}.ffn_"
            if part == "router.layer.weight":
                found[f"{stem}gate_inp.weight"] = values
            elif part == "output_linear.weight":
                found[f"{stem}down_exps.weight"] = values
            else:
                gate, up = np.split(values, 2, axis=1)
                found[f"{stem}gate_exps.weight"] = np.ascontiguousarray(gate)
                found[f"{stem}up_exps.weight"] = np.ascontiguousarray(up)
        return found
