"""Tiny models on disk: the same random weights as a GGUF file and as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType
from safetensors.numpy import save_file

from tests.compute_plane.model.mixture_tensors import MIXTURES, experts_in_gguf, mixture_shapes

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
    """The numbers and the weights of a model; names and row order are Hugging Face's."""

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
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
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
                prefix + "mlp.gate_proj.weight": (inner, hidden),
                prefix + "mlp.up_proj.weight": (inner, hidden),
                prefix + "mlp.down_proj.weight": (hidden, inner),
            }
            if self.architecture == "exaone4":
                del shapes[prefix + "input_layernorm.weight"]
                shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
            for fused, parts in FUSED.get(self.architecture, {}).items():
                rows = sum(shapes.pop(f"{prefix}{part}_proj.weight")[0] for part in parts)
                shapes[f"{prefix}{fused}_proj.weight"] = (rows, hidden)
            if self.architecture == "granitemoehybrid":
                for part in ("gate", "up", "down"):
                    del shapes[f"{prefix}mlp.{part}_proj.weight"]
                shapes[prefix + "shared_mlp.input_linear.weight"] = (2 * inner, hidden)
                shapes[prefix + "shared_mlp.output_linear.weight"] = (hidden, inner)
            if self.architecture in MIXTURES:
                for part in ("gate", "up", "down"):
                    del shapes[f"{prefix}mlp.{part}_proj.weight"]
                for name, shape in mixture_shapes(self).items():
                    shapes[prefix + name] = shape
            if self.architecture == "gpt_oss":
                shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
                shapes[prefix + "self_attn.sinks"] = (self.num_heads,)
            if self.architecture in ("qwen2", "glm4", "gpt_oss", "seed_oss"):
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

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the norms that a layer has beside the two of every one."""
        names = [f"self_attn.{part}_norm.weight" for part in ("q", "k")]
        has_them = self.architecture in ("qwen3", "qwen3_moe", "gemma3", "exaone4")
        found = dict.fromkeys(names if has_them else [], (self.head_dim,))
        if self.architecture == "gemma3":
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
        }
        return names.get(self.architecture, self.architecture)

    def weights_in_gguf(self) -> dict[str, np.ndarray]:
        """Return the weights that a GGUF file has, still by Hugging Face's names.

        Without `experts_in_gguf`.
        """
        if self.architecture in MIXTURES:
            parts = (".block_sparse_moe.", ".mlp.")
            return {n: v for n, v in self.weights.items() if not any(p in n for p in parts)}
        if self.architecture == "gemma3":
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

    def config(self) -> dict[str, Any]:
        names = {
            "smollm3": "SmolLM3",
            "granitemoehybrid": "GraniteMoeHybrid",
            "qwen3_moe": "Qwen3Moe",
            "granitemoe": "GraniteMoe",
            "gpt_oss": "GptOss",
            "seed_oss": "SeedOss",
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
            config |= {"num_local_experts": self.num_experts, "num_experts_per_tok": 2}
        if self.architecture == "qwen3_moe":
            del config["intermediate_size"]
            config |= {"moe_intermediate_size": self.intermediate_size, "norm_topk_prob": True}
        if self.architecture in (
            "phi3",
            "smollm3",
            "seed_oss",
        ):  # transformers' own are beyond the vocabulary
            config["pad_token_id"] = 0
        return config


GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}


GGUF_PARTS_OF_GLM = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
GGUF_PARTS_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def name_in_gguf(name: str, architecture: str = "llama") -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    module, _, kind = name.rpartition(".")
    if kind == "sinks":
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    _, _, layer, part = module.split(".", 3)
    others = {
        "gemma3": GGUF_PARTS_OF_GEMMA,
        "glm4": GGUF_PARTS_OF_GLM,
        "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
        "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
        "exaone4": GGUF_PARTS_OF_GEMMA,
    }
    parts = GGUF_PARTS | others.get(architecture, {})
    return f"blk.{layer}.{parts[part]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder query or key rows as the converter of llama.cpp does."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: TinyModel,
    kind: GgmlType = GgmlType.F32,
    *,
    change: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    skip_keys: tuple[str, ...] = (),
    stored: dict[str, tuple[np.ndarray, GgmlType]] | None = None,
    vectors: dict[str, Any] | None = None,
    expert_type: GgmlType | None = None,
) -> Path:
    """Write a model with the gguf package; matrices as `kind`, norms as F32.

    `expert_type`: of experts, where that is another one.

    `stored`: the rows of some tensors as they shall lie in the file, uint8, and their kind.
    `vectors`: tensors of numbers by the file's names that are there besides.
    """
    writer = gguf.GGUFWriter(path, model.in_gguf)
    writer.add_name("tiny")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_rope_dimension_count(model.rotary_dim or model.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if model.architecture == "llama" else "qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    if model.architecture in MIXTURES:
        writer.add_expert_count(model.num_experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(model.intermediate_size)
    for key in skip_keys:
        del writer.kv_data[0][key]
    change(writer)
    for name, values in model.weights_in_gguf().items():
        matrix_kind = kind if values.ndim > 1 else GgmlType.F32
        is_given = stored is not None and name in stored
        rows, matrix_kind = stored[name] if is_given else (values, matrix_kind)
        if model.in_gguf not in ("llama", "mistral3", "smollm3", "granite", "granitemoe"):
            pass  # the rows of those alone are turned
        elif name.endswith("q_proj.weight"):
            rows = interleave(rows, model.num_heads)
        elif name.endswith("k_proj.weight"):
            rows = interleave(rows, model.num_kv_heads)
        data = rows if is_given else gguf.quants.quantize(rows, matrix_kind)
        writer.add_tensor(name_in_gguf(name, model.in_gguf), data, raw_dtype=matrix_kind)
    experts = experts_in_gguf(model) if model.architecture in MIXTURES else {}
    for name, values in experts.items():
        expert_kind = expert_type or kind if "exps.weight" in name else GgmlType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, expert_kind), raw_dtype=expert_kind)
    for name, values in (vectors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_json() -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(TOKENS)},
            "merges": list(MERGES),
        },
    }


def write_directory(
    directory: Path,
    model: TinyModel,
    *,
    config: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a Hugging Face directory; `files` are further JSON documents, None for weights: own."""
    directory.mkdir(exist_ok=True)
    documents = {"config.json": model.config() | (config or {}), "tokenizer.json": tokenizer_json()}
    for name, document in (documents | (files or {})).items():
        (directory / name).write_text(json.dumps(document))
    save_file(model.weights if weights is None else weights, directory / "model.safetensors")
    return directory


class Tiny:
    """What the tests of this folder share."""

    model = TinyModel
    gguf = staticmethod(write_gguf)
    directory = staticmethod(write_directory)
    tokens = TOKENS
    tokenizer = staticmethod(tokenizer_json)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()
