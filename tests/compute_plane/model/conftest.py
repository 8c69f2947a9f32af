"""Tiny models on disk: the same random weights as a GGUF file and as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType
from safetensors.numpy import save_file

from compute_plane.model.loader import LoadedModel, load_model
from tests.compute_plane.model.mixture_tensors import MIXTURES, keys_of
from tests.compute_plane.model.tiny_model import MERGES, SPECIALS, TOKENS, TinyModel

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


TURNED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "granite_swa")
"""Whose rows of queries and keys the converter turns."""
NO_MATRICES = ("conv1d.weight", "conv.conv.weight", "mamba.norm.weight", "A_log", "mamba.D")
GGUF_PARTS_OF_GLM = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
GGUF_PARTS_OF_QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GGUF_PARTS_OF_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
}
GGUF_PARTS_OF_GRANITE4 = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "shared.gate_proj": "ffn_gate_shexp",
    "shared.up_proj": "ffn_up_shexp",
    "shared.down_proj": "ffn_down_shexp",
}
GGUF_PARTS_OF_DEEPSEEK = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
GGUF_VECTORS = {
    "D": "ssm_d",
    "sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "expert_bias": "exp_probs_b.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}
"""What has no weight in directories."""
GGUF_PARTS_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

GGUF_PARTS_OF_GEMMA4 = GGUF_PARTS_OF_GEMMA | {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}


def name_in_gguf(name: str, architecture: str = "llama") -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.embedding_norm.weight": "token_embd_norm.weight",
        "lm_head.weight": "output.weight",
        "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    }
    if name in fixed:
        return fixed[name]
    module, _, kind = name.rpartition(".")
    if kind in GGUF_VECTORS:
        return f"blk.{name.split('.')[2]}.{GGUF_VECTORS[kind]}"
    _, _, layer, part = module.split(".", 3)
    others = {
        "gemma2": GGUF_PARTS_OF_GEMMA,
        "gemma3": GGUF_PARTS_OF_GEMMA,
        "gemma4": GGUF_PARTS_OF_GEMMA4,
        "glm4": GGUF_PARTS_OF_GLM,
        "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
        "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
        "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
        "exaone4": GGUF_PARTS_OF_GEMMA,
        "olmo2": GGUF_PARTS_OF_GEMMA,
        "qwen35": GGUF_PARTS_OF_QWEN35,
        "qwen35moe": GGUF_PARTS_OF_QWEN35,
        "qwen3next": GGUF_PARTS_OF_QWEN35,
        **dict.fromkeys(
            ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"), GGUF_PARTS_OF_GRANITE4
        ),
        "lfm2": GGUF_PARTS_OF_LFM2,
        "deepseek2": GGUF_PARTS_OF_DEEPSEEK,
        "lfm2moe": GGUF_PARTS_OF_LFM2,
    }
    if architecture == "falcon-h1" and part == "post_attention_layernorm":
        return f"blk.{layer}.ffn_norm"  # without saying that it is weights
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
    most_tensors: int = 0,
) -> Path:
    """Write a model with the gguf package; matrices as `kind`, norms as F32.

    `expert_type`: of experts, where that is another one. `most_tensors`: of a file, where there are
    to be several; the first is returned, which has none then.

    `stored`: the rows of some tensors as they shall lie in the file, uint8, and their kind.
    `vectors`: tensors of numbers by the file's names that are there besides.
    """
    writer = gguf.GGUFWriter(
        path, model.in_gguf, split_max_tensors=most_tensors, small_first_shard=most_tensors > 0
    )
    writer.add_name("tiny")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(model.hidden_size)
    has_dense = model.dense_layers > 0
    writer.add_feed_forward_length(model.dense_size if has_dense else model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.kv_heads_in_gguf)
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
    for key, value in (keys_of(model) if model.architecture in MIXTURES else {}).items():
        kind_of_value = {bool: "bool", int: "uint32", float: "float32"}[type(value)]
        getattr(writer, f"add_{kind_of_value}")(f"{model.in_gguf}.{key}", value)
    for key, value in model.own_keys().items():
        add = {
            list: writer.add_array, bool: writer.add_bool, float: writer.add_float32,
            int: writer.add_uint32,
        }[type(value)]  # fmt: skip
        writer.kv_data[0].pop(f"{model.in_gguf}.{key}", None)
        add(f"{model.in_gguf}.{key}", value)
    for key in skip_keys:
        del writer.kv_data[0][key]
    change(writer)
    for name, values in model.weights_in_gguf().items():
        is_matrix = values.ndim > 1 and not name.endswith(NO_MATRICES)
        matrix_kind = kind if is_matrix else GgmlType.F32
        is_given = stored is not None and name in stored
        rows, matrix_kind = stored[name] if is_given else (values, matrix_kind)
        if model.in_gguf not in TURNED:
            pass
        elif name.endswith("q_proj.weight"):
            rows = interleave(rows, model.num_heads)
        elif name.endswith("k_proj.weight"):
            rows = interleave(rows, model.num_kv_heads)
        data = rows if is_given else gguf.quants.quantize(rows, matrix_kind)
        writer.add_tensor(name_in_gguf(name, model.in_gguf), data, raw_dtype=matrix_kind)
    for name, values in model.experts_in_gguf().items():
        expert_kind = expert_type or kind if "exps.weight" in name else GgmlType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, expert_kind), raw_dtype=expert_kind)
    for name, values in (vectors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*.gguf")) if most_tensors else path


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


# A tiny Llama, and what both kinds of its files load as.


@pytest.fixture(scope="module")
def made() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="module")
def model(tiny, made, tmp_path_factory) -> LoadedModel:
    return load_model(str(tiny.directory(tmp_path_factory.mktemp("model") / "m", made)))


@pytest.fixture(scope="module")
def in_gguf(tiny, made, tmp_path_factory) -> LoadedModel:
    return load_model(str(tiny.gguf(tmp_path_factory.mktemp("model") / "m.gguf", made)))
