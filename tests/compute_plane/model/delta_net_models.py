"""Tiny models with Gated DeltaNet, as directories and as llama.cpp's converter writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.mixture_tensors import (
    MIXTURES,
    SHARED_SIZE,
    is_of_experts,
    mixture_shapes,
)
from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

IN_GGUF = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
CLASSES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


@dataclass
class DeltaNetModel(TinyModel):
    """One of `IN_GGUF`; every fourth layer attends."""

    num_layers: int = 4
    head_dim: int = 32
    rotary_dim: int | None = 8
    architecture: str = "qwen3_5_text"
    tied: bool = False
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    kernel_size: int = 4

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        for layer in range(self.num_layers):
            prefix, own = f"model.layers.{layer}.", self._mixer_shapes()
            if self.attends(layer):
                own = self._attention_shapes()
            if self.architecture in MIXTURES:
                own |= mixture_shapes(self)
            else:
                own |= self._feedforward_shapes(layer)
            own |= dict.fromkeys(
                ("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,)
            )
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
        return layer % 4 == 3

    @property
    def value_size(self) -> int:
        """Width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    def _mixer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.num_value_heads
        inputs = {
            "in_proj_qkv.weight": (self.channels, hidden),
            "in_proj_z.weight": (self.value_size, hidden),
            "in_proj_b.weight": (heads, hidden),
            "in_proj_a.weight": (heads, hidden),
        }
        if self.architecture == "qwen3_next":
            inputs = {
                "in_proj_qkvz.weight": (self.channels + self.value_size, hidden),
                "in_proj_ba.weight": (2 * heads, hidden),
            }
        own: dict[str, tuple[int, ...]] = {
            **inputs,
            "conv1d.weight": (self.channels, 1, self.kernel_size),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (hidden, self.value_size),
        }
        return {f"linear_attn.{name}": shape for name, shape in own.items()}

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (2 * query, self.hidden_size),
            "k_proj.weight": (kv, self.hidden_size),
            "v_proj.weight": (kv, self.hidden_size),
            "o_proj.weight": (self.hidden_size, query),
            "q_norm.weight": (self.head_dim,),
            "k_norm.weight": (self.head_dim,),
        }
        return {f"self_attn.{name}": shape for name, shape in own.items()}

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": [CLASSES[self.architecture]],
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.kernel_size,
            "full_attention_interval": 4,
        }

    @property
    def in_gguf(self) -> str:
        return IN_GGUF[self.architecture]

    def own_keys(self) -> dict[str, Any]:
        own: dict[str, Any] = {"expert_shared_feed_forward_length": SHARED_SIZE}
        return (own if self.architecture in MIXTURES else {}) | {
            "ssm.conv_kernel": self.kernel_size,
            "ssm.state_size": self.key_dim,
            "ssm.group_count": self.num_key_heads,
            "ssm.time_step_rank": self.num_value_heads,
            "ssm.inner_size": self.value_size,
            "full_attention_interval": 4,
            "rope.dimension_sections": [2, 1, 1, 0],
        }

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        found = {}
        for name, values in self.weights.items():
            if self.architecture in MIXTURES and is_of_experts(self, name):
                continue
            if name.endswith("A_log"):
                found[name] = -np.exp(values)
            elif name.endswith("conv1d.weight"):
                found[name] = values[:, 0]
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                found[name] = values + np.float32(1)
            elif name.endswith("in_proj_qkvz.weight"):
                stem = name.removesuffix("qkvz.weight")
                found[f"{stem}qkv.weight"], found[f"{stem}z.weight"] = self._apart(values)
            else:
                found[name] = values
        if self.architecture != "qwen3_next":
            found = {name: self._tiled(name, values) for name, values in found.items()}
        return found

    def _apart(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of q, k, v of all heads, and those of z, from rows head by head."""
        of_values = self.value_size // self.num_key_heads
        heads = rows.reshape(self.num_key_heads, -1, rows.shape[1])
        places = np.cumsum([self.key_dim, self.key_dim, of_values])
        *parts, z = (part.reshape(-1, rows.shape[1]) for part in np.split(heads, places, axis=1))
        return np.concatenate(parts), z

    def _tiled(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return a tensor with value heads as llama.cpp repeats key heads: 0, 1, … 0, 1, …"""
        part = name.partition(".linear_attn.")[2]
        if not part or part == "norm.weight":
            return values
        if part == "out_proj.weight":
            return self._tiled_rows(values.T).T.copy()
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            first = 2 * self.num_key_heads * self.key_dim
            return np.concatenate([values[:first], self._tiled_rows(values[first:])])
        return self._tiled_rows(values)

    def _tiled_rows(self, rows: np.ndarray) -> np.ndarray:
        each = self.num_value_heads // self.num_key_heads
        heads = rows.reshape(self.num_key_heads, each, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)
