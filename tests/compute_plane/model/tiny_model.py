"""The numbers and the weights of tiny models, by Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.compute_plane.model.mixture_tensors import (
    MIXTURES,
    SHARING,
    config_of,
    experts_in_gguf,
    is_of_experts,
    mixture_shapes,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ hell")


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE spells each byte with, by byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    spelling = {byte: chr(byte) for byte in kept}
    spelling |= {byte: chr(256 + index) for index, byte in enumerate(rest)}
    return [spelling[byte] for byte in range(256)]


TOKENS = (*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES))


FUSED = {
    "phi3": {
        "self_attn.qkv": ("self_attn.q", "self_attn.k", "self_attn.v"),
        "mlp.gate_up": ("mlp.gate", "mlp.up"),
    },
    "glm4": {"mlp.gate_up": ("mlp.gate", "mlp.up")},
}
"""Matrices that files of an architecture hold in one."""


@dataclass
class TinyModel:
    """The numbers and the weights of a model; names and row order are Hugging Face's.

    `dense_layers`: of a mixture, how many have one MLP, `dense_size` wide. `has_extras`: of a
    GLM-4.5, biases and norms of heads. `leaves_rows`: GGUF files have vectors as a row where
    directories have them so.
    """

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    hidden_size: int = 64
    intermediate_size: int = 96
    tied: bool = True
    seed: int = 7
    architecture: str = "llama"
    rotary_dim: int | None = None
    num_experts: int = 6
    dense_layers: int = 0
    dense_size: int = 80
    has_extras: bool = True
    leaves_rows: bool = False
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden = self.hidden_size
        shapes = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (query, hidden),
                prefix + "self_attn.k_proj.weight": (kv, hidden),
                prefix + "self_attn.v_proj.weight": (kv, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, query),
                prefix + "post_attention_layernorm.weight": (hidden,),
            }
            of_mlp = self._feedforward_shapes(layer)
            shapes |= {prefix + name: shape for name, shape in of_mlp.items()}
            if self.architecture in ("exaone4", "olmo2", "olmo3"):
                del shapes[prefix + "input_layernorm.weight"]
                shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
            for fused, parts in FUSED.get(self.architecture, {}).items():
                rows = sum(shapes.pop(f"{prefix}{part}_proj.weight")[0] for part in parts)
                shapes[f"{prefix}{fused}_proj.weight"] = (rows, hidden)
            if self.architecture == "gpt_oss":
                shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
            if self.architecture in ("gpt_oss", "granite_swa"):
                shapes[prefix + "self_attn.sinks"] = (self.num_heads,)
            if self.architecture in ("qwen2", "qwen2_moe", "glm4", "gpt_oss", "seed_oss") or (
                self.architecture == "glm4_moe" and self.has_extras
            ):
                shapes[prefix + "self_attn.q_proj.bias"] = (query,)
                shapes[prefix + "self_attn.k_proj.bias"] = (kv,)
                shapes[prefix + "self_attn.v_proj.bias"] = (kv,)
            shapes |= {prefix + name: shape for name, shape in self._norm_shapes().items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (len(TOKENS), hidden)
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }

    def _feedforward_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return what a layer has behind its attention."""
        hidden, inner = self.hidden_size, self.intermediate_size
        if self.architecture == "granitemoehybrid":
            return {
                "shared_mlp.input_linear.weight": (2 * inner, hidden),
                "shared_mlp.output_linear.weight": (hidden, inner),
            }
        if self.architecture in MIXTURES and layer >= self.dense_layers:
            return mixture_shapes(self)
        inner = self.dense_size if self.dense_layers else inner
        return {
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the norms that a layer has beside the two of every one."""
        names = [f"self_attn.{part}_norm.weight" for part in ("q", "k")]
        named = "qwen3", "qwen3_moe", "gemma3", "exaone4", "exaone_moe", "dots1"
        has_them = self.architecture in named or (
            self.architecture == "glm4_moe" and self.has_extras
        )
        found = dict.fromkeys(names if has_them else [], (self.head_dim,))
        if self.architecture in ("olmo2", "olmo3", "olmoe", "minimax_m2"):
            heads = self.num_heads, self.num_kv_heads
            found = {
                name: (count * self.head_dim,) for name, count in zip(names, heads, strict=True)
            }
        if self.architecture in ("gemma2", "gemma3"):
            of_mlp = [f"{side}_feedforward_layernorm.weight" for side in ("pre", "post")]
            found |= dict.fromkeys(of_mlp, (self.hidden_size,))
        if self.architecture == "glm4":
            behind = [f"post_{part}_layernorm.weight" for part in ("self_attn", "mlp")]
            found |= dict.fromkeys(behind, (self.hidden_size,))
        return found

    @property
    def in_gguf(self) -> str:
        """What a GGUF file calls the architecture."""
        names = {
            "granitemoehybrid": "granite",
            "mixtral": "llama",
            "ministral3": "mistral3",
            "qwen3_moe": "qwen3moe",
            "gpt_oss": "gpt-oss",
            "qwen2_moe": "qwen2moe",
            "glm4_moe": "glm4moe",
            "ernie4_5_moe": "ernie4_5-moe",
            "olmo3": "olmo2",
            "exaone_moe": "exaone-moe",
            "minimax_m2": "minimax-m2",
            "solar_open": "glm4moe",
        }
        return names.get(self.architecture, self.architecture)

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        """Return the weights that a GGUF file has, still by Hugging Face's names.

        Without `experts_in_gguf`.
        """
        if self.architecture in MIXTURES:
            return {n: v for n, v in self.weights.items() if not is_of_experts(self, n)}
        if self.architecture in ("gemma2", "gemma3"):
            return {n: w + np.float32("norm" in n) for n, w in self.weights.items()}
        if self.architecture != "granitemoehybrid":
            return self.weights
        found = {}
        for name, values in self.weights.items():
            prefix, _, part = name.partition("shared_mlp.")
            if part == "input_linear.weight":
                found[f"{prefix}mlp.gate_proj.weight"] = values[: self.intermediate_size]
                found[f"{prefix}mlp.up_proj.weight"] = values[self.intermediate_size :]
            elif part:
                found[f"{prefix}mlp.down_proj.weight"] = values
            else:
                found[name] = values
        return found

    @property
    def kv_heads_in_gguf(self) -> int | list[int]:
        """What a GGUF file says of key and value heads."""
        return self.num_kv_heads

    def experts_in_gguf(self) -> dict[str, np.ndarray]:
        """Return routers and experts by the file's names."""
        return experts_in_gguf(self) if self.architecture in MIXTURES else {}

    def own_keys(self) -> dict[str, Any]:
        """Return what a GGUF file says that those of other architectures do not."""
        return {}

    def config(self) -> dict[str, Any]:
        names = {
            "smollm3": "SmolLM3",
            "granitemoehybrid": "GraniteMoeHybrid",
            "granite_swa": "GraniteSWA",
            "qwen3_moe": "Qwen3Moe",
            "granitemoe": "GraniteMoe",
            "gpt_oss": "GptOss",
            "seed_oss": "SeedOss",
            "qwen2_moe": "Qwen2Moe",
            "glm4_moe": "Glm4Moe",
            "ernie4_5_moe": "Ernie4_5_Moe",
            "exaone_moe": "ExaoneMoe",
            "minimax_m2": "MiniMaxM2",
            "solar_open": "SolarOpen",
        }
        model_types = {"gemma3": "gemma3_text"}
        name = names.get(self.architecture, self.architecture.capitalize())
        config = {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": model_types.get(self.architecture, self.architecture),
            "vocab_size": len(TOKENS),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.rotary_dim is not None:
            if self.architecture == "minimax_m2":
                config["rotary_dim"] = self.rotary_dim
            else:
                config["partial_rotary_factor"] = self.rotary_dim / self.head_dim
        if self.architecture == "granitemoehybrid":
            del config["intermediate_size"]
            config |= {
                "shared_intermediate_size": self.intermediate_size,
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "layer_types": ["attention"] * self.num_layers,
                "position_embedding_type": "rope",
            }
        if self.architecture in MIXTURES:
            config |= config_of(self)
        if self.architecture in ("qwen3_moe", "qwen2_moe"):
            del config["intermediate_size"]
        elif self.architecture in SHARING:
            config["intermediate_size"] = self.dense_size
        if self.architecture in (
            "phi3",
            "smollm3",
            "seed_oss",
        ):  # transformers' own are beyond the vocabulary
            config["pad_token_id"] = 0
        return config
