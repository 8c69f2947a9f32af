"""Tiny models with attention over latents, as directories and as llama.cpp's converter has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compute_plane.model.tiny_model import TOKENS, TinyModel

CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
}
PARTS_OF_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
BOTH = "self_attn.kv_b_proj.weight"


@dataclass
class LatentModel(TinyModel):
    """One of `CLASSES`; layer 0 of those with experts has one MLP.

    `rank`, `turning`, `plain`, `value_size`, `query_rank`: as in `compute_plane.model.latents`.
    `groups`: of experts, and of a token; the first 1: there are none. `is_older`: GGUF files have
    the matrices of keys and values in one.
    """

    architecture: str = "deepseek_v3"
    num_layers: int = 3
    num_experts: int = 8
    rank: int = 32
    turning: int = 16
    plain: int = 32
    value_size: int = 64
    query_rank: int = 96
    groups: tuple[int, int] = (4, 2)
    is_older: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        hidden = self.hidden_size
        self.num_kv_heads = self.num_heads
        self.dense_layers = 1 if self.has_experts else 0
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), hidden)}
        for layer in range(self.num_layers):
            own = self._attention_shapes() | self._feedforward_shapes(layer)
            names = "input_layernorm.weight", "post_attention_layernorm.weight"
            own |= dict.fromkeys(names, (hidden,))
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (len(TOKENS), hidden)
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
        }

    @property
    def has_experts(self) -> bool:
        """Whether layers have a mixture."""
        return self.architecture != "youtu"

    @property
    def corrects(self) -> bool:
        """Whether experts are chosen by sigmoids with corrections."""
        return self.architecture in ("deepseek_v3", "glm4_moe_lite")

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.num_heads
        queries = heads * (self.plain + self.turning)
        own: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
        if self.query_rank:
            own = {
                "q_a_proj.weight": (self.query_rank, hidden),
                "q_a_layernorm.weight": (self.query_rank,),
                "q_b_proj.weight": (queries, self.query_rank),
            }
        own |= {
            "kv_a_proj_with_mqa.weight": (self.rank + self.turning, hidden),
            "kv_a_layernorm.weight": (self.rank,),
            "kv_b_proj.weight": (heads * (self.plain + self.value_size), self.rank),
            "o_proj.weight": (hidden, heads * self.value_size),
        }
        return {f"self_attn.{name}": shape for name, shape in own.items()}

    def _feedforward_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size

        def parts(width: int) -> dict[str, tuple[int, ...]]:
            return {
                "gate_proj.weight": (width, hidden),
                "up_proj.weight": (width, hidden),
                "down_proj.weight": (hidden, width),
            }

        if not self.has_experts or layer < self.dense_layers:
            width = self.dense_size if self.has_experts else inner
            return {f"mlp.{name}": shape for name, shape in parts(width).items()}
        own: dict[str, tuple[int, ...]] = {
            f"experts.{expert}.{name}": shape
            for expert in range(self.num_experts)
            for name, shape in parts(inner).items()
        }
        own["gate.weight"] = (self.num_experts, hidden)
        if self.corrects:
            own["gate.e_score_correction_bias"] = (self.num_experts,)
        own |= {f"shared_experts.{name}": shape for name, shape in parts(inner).items()}
        return {f"mlp.{name}": shape for name, shape in own.items()}

    def config(self) -> dict[str, Any]:
        config = super().config() | {
            "architectures": [CLASSES[self.architecture]],
            "rms_norm_eps": 1e-6,  # of latents' norms transformers has this anyway
            "kv_lora_rank": self.rank,
            "q_lora_rank": self.query_rank or None,
            "qk_nope_head_dim": self.plain,
            "qk_rope_head_dim": self.turning,
            "v_head_dim": self.value_size,
        }
        del config["head_dim"]
        if self.has_experts:
            in_groups = self.groups[0] > 1
            config |= {
                "n_routed_experts": self.num_experts,
                "num_experts_per_tok": 3,
                "n_shared_experts": 1,
                "moe_intermediate_size": self.intermediate_size,
                "intermediate_size": self.dense_size,
                "first_k_dense_replace": self.dense_layers,
                "n_group": self.groups[0],
                "topk_group": self.groups[1],
                "routed_scaling_factor": 1.5,
                "norm_topk_prob": self.corrects,
                "topk_method": "noaux_tc"
                if self.corrects
                else "group_limited_greedy"
                if in_groups
                else "greedy",
                "num_nextn_predict_layers": 0,
            }
        return config

    @property
    def in_gguf(self) -> str:
        return "deepseek2"

    @property
    def kv_heads_in_gguf(self) -> int:
        return self.num_heads if self.is_older else 1

    def own_keys(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.kv_lora_rank": self.rank,
            "rope.dimension_count": self.turning,
        }
        sizes = {"key": self.plain + self.turning, "value": self.value_size}
        if self.is_older:
            own |= {f"attention.{name}_length": size for name, size in sizes.items()}
        else:
            own |= {f"attention.{name}_length_mla": size for name, size in sizes.items()}
            own |= {
                "attention.key_length": self.rank + self.turning,
                "attention.value_length": self.rank,
            }
        if self.query_rank:
            own["attention.q_lora_rank"] = self.query_rank
        if self.has_experts:
            own |= {
                "expert_count": self.num_experts,
                "expert_used_count": 3,
                "expert_shared_count": 1,
                "expert_feed_forward_length": self.intermediate_size,
                "leading_dense_block_count": self.dense_layers,
                "expert_weights_scale": 1.5,
                "expert_weights_norm": self.corrects,
                "expert_gating_func": 2 if self.corrects else 1,
                "expert_group_count": self.groups[0],
                "expert_group_used_count": self.groups[1],
            }
        else:
            # llama.cpp wants them whether there are experts or not.
            own |= {
                "leading_dense_block_count": self.num_layers,
                "expert_feed_forward_length": self.intermediate_size,
                "expert_shared_count": 0,
            }
        return own

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        found = {}
        for name, values in self.weights.items():
            if ".experts." in name:
                continue
            if name.endswith(BOTH) and not self.is_older:
                prefix = name.removesuffix("kv_b_proj.weight")
                heads = values.reshape(self.num_heads, -1, self.rank)
                keys = heads[:, : self.plain].swapaxes(1, 2)
                found[f"{prefix}k_b_proj.weight"] = np.ascontiguousarray(keys)
                found[f"{prefix}v_b_proj.weight"] = np.ascontiguousarray(heads[:, self.plain :])
            else:
                found[name] = values
        return found

    def experts_in_gguf(self) -> dict[str, np.ndarray]:
        """Return experts by the file's names, those of a layer in one."""
        found: dict[str, list[np.ndarray]] = {}
        for name, values in self.weights.items():
            if ".experts." in name:
                layer, part = name.split(".")[2], PARTS_OF_EXPERTS[name.split(".")[-2]]
                found.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(values)
        return {name: np.stack(values) for name, values in found.items()}
