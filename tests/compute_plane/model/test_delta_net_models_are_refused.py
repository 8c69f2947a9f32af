"""Qwen3-Next and Qwen3.5 that compute otherwise, or whose files are wrong, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from tests.compute_plane.model.delta_net_models import IN_GGUF, DeltaNetModel

FULL, LINEAR = "full_attention", "linear_attention"


def refused(path: Path, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "config", "error", "words"),
    [
        ("qwen3_5_text", {"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act must be silu"),
        (
            "qwen3_5_text",
            {"architectures": ["Qwen3ForCausalLM"]},
            UnsupportedModelError,
            "architectures must name Qwen3_5ForCausalLM, got",
        ),
        ("qwen3_next", {"decoder_sparse_step": 2}, UnsupportedModelError, "decoder_sparse_step"),
        ("qwen3_next", {"mlp_only_layers": [1]}, UnsupportedModelError, "mlp_only_layers"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, UnsupportedModelError, "mlp_only_layers"),
        ("qwen3_5_text", {"layer_types": [FULL] * 3}, ModelFileError, "for each of 4 layers"),
        (
            "qwen3_5_text",
            {"layer_types": [FULL] * 3 + ["sliding_attention"]},
            ModelFileError,
            "layer_types must be linear_attention or full_attention for each of 4 layers",
        ),
        ("qwen3_5_text", {"layer_types": [LINEAR] * 4}, ModelFileError, "must attend"),
        (
            "qwen3_5_text",
            {"full_attention_interval": 0},
            ModelFileError,
            "full_attention_interval must be at least 1, got 0",
        ),
        ("qwen3_5_text", {"linear_num_value_heads": 5}, ModelFileError, "multiple of num_key_h"),
        ("qwen3_5_text", {"linear_num_key_heads": 0}, ModelFileError, "num_key_heads must be 1"),
        ("qwen3_5_text", {"linear_key_head_dim": 48}, ModelFileError, "key_dim must be a multiple"),
        ("qwen3_5_text", {"linear_value_head_dim": 512}, ModelFileError, "value_dim must be 1 to"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, ModelFileError, "kernel_size must be 2"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 3}, ModelFileError, "conv1d.weight has shape"),
        ("qwen3_next", {"num_attention_heads": 8}, ModelFileError, "q_proj.weight has shape"),
    ],
)
def test_configurations_that_cannot_be_or_compute_otherwise(
    tiny, tmp_path: Path, architecture: str, config: dict[str, Any], error: type[Exception],
    words: str,
) -> None:  # fmt: skip
    made = DeltaNetModel(architecture=architecture)
    refused(tiny.directory(tmp_path / "m", made, config=config), error, words)


MIXED = "linear_attn.in_proj_qkvz.weight"


@pytest.mark.parametrize(
    ("architecture", "name", "in_gguf"),
    [
        ("qwen3_5_text", "0.linear_attn.A_log", "blk.0.ssm_a"),
        ("qwen3_5_text", "1.linear_attn.dt_bias", r"blk.1.ssm_dt\.bias"),
        ("qwen3_5_text", "0.linear_attn.conv1d.weight", "blk.0.ssm_conv1d.weight"),
        ("qwen3_5_text", "2.linear_attn.in_proj_b.weight", "blk.2.ssm_beta.weight"),
        ("qwen3_5_text", "3.self_attn.q_proj.weight", "blk.3.attn_q.weight"),
        ("qwen3_5_text", "3.post_attention_layernorm.weight", "blk.3.post_attention_norm.weight"),
        ("qwen3_5_moe_text", "0.mlp.shared_expert_gate.weight", "blk.0.ffn_gate_inp_shexp.weight"),
        ("qwen3_next", f"0.{MIXED}", "blk.0.attn_qkv.weight, blk.0.attn_gate.weight"),
        ("qwen3_next", "0.linear_attn.in_proj_ba.weight", "blk.0.ssm_ba.weight"),
    ],
)
def test_a_missing_tensor_is_named(
    tiny, tmp_path: Path, architecture: str, name: str, in_gguf: str
) -> None:
    made = DeltaNetModel(architecture=architecture)
    full = f"model.layers.{name}"
    for_gguf = DeltaNetModel(architecture=architecture)
    del made.weights[full], for_gguf.weights[full]
    refused(tiny.directory(tmp_path / "m", made), ModelFileError, f"missing tensors: {full}")
    refused(tiny.gguf(tmp_path / "m.gguf", made), ModelFileError, f"missing tensors: {in_gguf}")


@pytest.mark.parametrize("architecture", IN_GGUF)
def test_tensors_without_a_place_are_named(tiny, tmp_path: Path, architecture: str) -> None:
    """Such as those of the other kind of layer, and of a vision tower beside a text model."""
    made = DeltaNetModel(architecture=architecture)
    for name in (
        "model.layers.3.linear_attn.A_log",
        "model.layers.0.self_attn.q_norm.weight",
        "model.visual.merger.norm.weight",
    ):
        own = made.weights | {name: np.ones(3, np.float32)}
        folder = tiny.directory(tmp_path / name, made, weights=own)
        refused(folder, ModelFileError, rf"a Qwen3[-.\w ]* model does not have: {name}")
    file = tiny.gguf(tmp_path / "m.gguf", made, vectors={"blk.3.ssm_a": [1.0]})
    refused(file, ModelFileError, r"model does not have: blk\.3\.ssm_a")


def test_logarithms_of_rates_that_no_float_holds_are_named(tiny, tmp_path: Path) -> None:
    made = DeltaNetModel()
    made.weights["model.layers.1.linear_attn.A_log"][2] = 100.0
    source = load_model(str(tiny.directory(tmp_path / "m", made))).source
    with pytest.raises(ModelFileError, match=r"layers\.1\.linear_attn\.A_log holds too large log"):
        source.tensor("model.layers.1.linear_attn.rates").to_float32()


def with_key(key: str, value: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        full = f"qwen35.{key}"
        writer.kv_data[0].pop(full, None)
        if isinstance(value, list):
            writer.add_array(full, value)
        elif value is not None:
            writer.add_uint32(full, value)

    return change


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ssm.group_count", None, "key qwen35.ssm.group_count is missing"),
        ("ssm.conv_kernel", 9, "kernel_size must be 2 to 8, got 9"),
        ("ssm.inner_size", 130, "inner_size 130 is not a multiple of qwen35.ssm.time_step_rank 4"),
        ("ssm.time_step_rank", 0, "not a multiple of qwen35.ssm.time_step_rank 0"),
        ("ssm.state_size", 64, r"attn_qkv\.weight has shape"),
        ("full_attention_interval", 0, "qwen35.full_attention_interval must be at least 1, got 0"),
        ("full_attention_interval", 5, "must attend"),
        ("attention.recurrent_layers", [True] * 3, "true or false of each of 4 layers"),
        ("attention.recurrent_layers", [True] * 4, "must attend"),
        ("expert_count", 4, "mixtures of experts are not supported"),
    ],
)
def test_gguf_files_that_contradict_themselves(
    tiny, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    path = tiny.gguf(tmp_path / "m.gguf", DeltaNetModel(), change=with_key(key, value))
    refused(path, ModelFileError, words)
