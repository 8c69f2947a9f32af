"""LFM2 from both kinds of files: what they say, which tensors are which, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compute_plane.model import expert_layout, layout, short_convolution_layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.layout import layer_tensor
from compute_plane.model.loader import load_model
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import Mixture
from tests.compute_plane.model.lfm2_models import IN_GGUF, Lfm2Model

KINDS = pytest.mark.parametrize("architecture", IN_GGUF)
FULL, CONV = "full_attention", "conv"


def files_of(tiny, folder: Path, made: Lfm2Model) -> tuple[Path, Path]:
    return tiny.directory(folder / "m", made), tiny.gguf(folder / "m.gguf", made)


@KINDS
def test_files_say_what_a_model_is(tiny, tmp_path: Path, architecture: str) -> None:
    made = Lfm2Model(architecture=architecture, kernel_size=4)
    mixture = Mixture(
        6, 2, scores="sigmoid", corrects_choice=True, dense_layers=1, dense_size=made.dense_size
    )
    for path in files_of(tiny, tmp_path, made):
        spec = load_model(str(path)).spec
        assert spec.architecture == IN_GGUF[architecture]
        assert spec.recurrence == ShortConvolution(64, 4, frozenset({0, 2}))
        assert spec.attending_layers() == (1, 3)
        assert (spec.num_kv_heads, spec.head_dim) == (2, 16)
        assert (spec.has_head_norms, spec.gates_attention) == (True, False)
        assert spec.mixture == (mixture if made.has_experts else None)
        assert spec.rms_norm_eps == pytest.approx(1e-5)
        assert spec.num_parameters == sum(values.size for values in made.weights.values())


@KINDS
def test_both_kinds_of_files_give_the_tensors_that_are_meant(
    tiny, tmp_path: Path, architecture: str
) -> None:
    made = Lfm2Model(architecture=architecture)
    named = {
        (0, short_convolution_layout.INPUTS): "conv.in_proj",
        (0, short_convolution_layout.OUT): "conv.out_proj",
        (0, layout.ATTN_NORM): "operator_norm",
        (0, layout.MLP_NORM): "ffn_norm",
        (0, layout.GATE): "feed_forward.w1",
        (0, layout.UP): "feed_forward.w3",
        (0, layout.DOWN): "feed_forward.w2",
        (1, layout.OUTPUT): "self_attn.out_proj",
        (1, layout.VALUE): "self_attn.v_proj",
        (1, layout.KEY_NORM): "self_attn.k_layernorm",
    }
    if made.has_experts:
        named |= {
            (2, expert_layout.ROUTER): "feed_forward.gate",
            (2, expert_layout.expert_role(4, expert_layout.UP)): "feed_forward.experts.4.w3",
            (2, expert_layout.expert_role(5, expert_layout.DOWN)): "feed_forward.experts.5.w2",
        }
    for path in files_of(tiny, tmp_path, made):
        source = load_model(str(path)).source

        def get(name: str) -> np.ndarray:
            return source.tensor(name).to_float32()  # noqa: B023 - used in this turn

        for (layer, role), name in named.items():
            stored = made.weights[f"model.layers.{layer}.{name}.weight"]
            np.testing.assert_array_equal(get(layer_tensor(layer, role)), stored)
        taps = get(layer_tensor(2, short_convolution_layout.CONVOLUTION))
        stored = made.weights["model.layers.2.conv.conv.weight"]
        np.testing.assert_array_equal(taps, stored[:, 0])
        norm = made.weights["model.embedding_norm.weight"]
        np.testing.assert_array_equal(get(layout.FINAL_NORM), norm)
        if made.has_experts:
            correction = get(layer_tensor(3, expert_layout.CORRECTION, layout.BIAS))
            bias = made.weights["model.layers.3.feed_forward.expert_bias"]
            np.testing.assert_array_equal(correction, bias)


def test_older_configurations_name_what_they_have_otherwise(tiny, tmp_path: Path) -> None:
    made = Lfm2Model(intermediate_size=256)
    own = {
        "layer_types": None, "full_attn_idxs": [1, 3], "tie_word_embeddings": None,
        "tie_embedding": True, "intermediate_size": 12288, "block_ff_dim": 256,
    }  # fmt: skip
    spec = load_model(str(tiny.directory(tmp_path / "m", made, config=own))).spec
    assert spec.recurrence == ShortConvolution(64, 3, frozenset({0, 2}))
    assert spec.tie_embeddings


def test_the_older_name_for_a_tied_embedding_holds_before_the_other(tiny, tmp_path: Path) -> None:
    """Of LFM2 alone; a file without a head must be said to be tied."""
    made, llama = Lfm2Model(), tiny.model(architecture="llama", tied=True)

    def load(model: Any, **own: bool | None) -> bool:
        return load_model(
            str(tiny.directory(tmp_path / "m", model, config=own))
        ).spec.tie_embeddings

    assert load(made, tie_embedding=True, tie_word_embeddings=False)
    for others in (None, True):
        with pytest.raises(ModelFileError, match=r"missing tensors: lm_head\.weight"):
            load(made, tie_embedding=False, tie_word_embeddings=others)
    assert load(llama, tie_embedding=False, tie_word_embeddings=True)


def test_what_a_configuration_does_not_say_is_what_transformers_takes(tiny, tmp_path: Path) -> None:
    from transformers import Lfm2Config, Lfm2MoeConfig

    for architecture, theirs in (("lfm2", Lfm2Config()), ("lfm2_moe", Lfm2MoeConfig())):
        own = {"rope_theta": None, "rope_parameters": None}
        made = Lfm2Model(architecture=architecture)
        spec = load_model(str(tiny.directory(tmp_path / architecture, made, config=own))).spec
        assert spec.rope_theta == theirs.rope_parameters["rope_theta"]


def test_experts_are_weighed_as_a_configuration_says(tiny, tmp_path: Path) -> None:
    made = Lfm2Model(architecture="lfm2_moe")
    own = {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "use_expert_bias": False}
    for layer in range(made.dense_layers, made.num_layers):
        del made.weights[f"model.layers.{layer}.feed_forward.expert_bias"]
    mixture = load_model(str(tiny.directory(tmp_path / "m", made, config=own))).spec.mixture
    assert mixture is not None
    assert not mixture.normalises_weights
    assert mixture.weight_scale == 2.5
    assert not mixture.corrects_choice


@pytest.mark.parametrize(
    ("own", "width"),
    [
        ({"block_auto_adjust_ff_dim": True, "intermediate_size": 384}, 256),
        ({"block_auto_adjust_ff_dim": None, "intermediate_size": 385}, 256),
        ({"block_auto_adjust_ff_dim": True, "intermediate_size": 390}, 512),
        (
            {
                "block_auto_adjust_ff_dim": True, "intermediate_size": 100,
                "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 32,
            },
            128,
        ),
    ],
)  # fmt: skip
def test_the_width_of_the_mlp_is_adjusted_as_in_transformers(
    tiny, tmp_path: Path, own: dict[str, Any], width: int
) -> None:
    made = Lfm2Model(intermediate_size=width)
    path = tiny.directory(tmp_path / "m", made, config=own)
    assert load_model(str(path)).spec.intermediate_size == width
    from transformers import AutoConfig
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    known = {key: value for key, value in own.items() if value is not None}
    theirs = AutoConfig.for_model("lfm2", hidden_size=64, **known)
    assert Lfm2MLP(theirs).w1.out_features == width


def test_a_model_whose_layers_all_attend_has_no_states(tiny, tmp_path: Path) -> None:
    class Attends(Lfm2Model):
        @staticmethod
        def attends(layer: int) -> bool:  # noqa: ARG004 - as in its base
            return True

    for path in files_of(tiny, tmp_path, Attends()):
        spec = load_model(str(path)).spec
        assert spec.recurrence is None
        assert spec.attending_layers() == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"conv_bias": True}, UnsupportedModelError, "conv_bias = true is not supported"),
        ({"conv_L_cache": 1}, ModelFileError, "kernel_size must be 2 to 8, got 1"),
        ({"conv_L_cache": 9}, ModelFileError, "kernel_size must be 2 to 8, got 9"),
        ({"conv_L_cache": 4}, ModelFileError, "conv.conv.weight has shape"),
        ({"layer_types": [CONV] * 4}, ModelFileError, "at least one of the model's layers must"),
        ({"layer_types": [FULL] * 3}, ModelFileError, "layer_types must be conv or full_att"),
        ({"layer_types": [FULL, CONV, "x", FULL]}, ModelFileError, "for each of 4 layers"),
        (
            {"layer_types": None, "full_attn_idxs": "1"},
            ModelFileError,
            "full_attn_idxs must be numbers of layers",
        ),
        (
            {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0},
            ModelFileError,
            "block_multiple_of must be more than 0",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModelError, "Lfm2ForCausalLM"),
        ({"architectures": [["Lfm2ForCausalLM"]]}, UnsupportedModelError, "Lfm2ForCausalLM"),
    ],
)
def test_configurations_that_cannot_be_or_compute_otherwise_are_refused(
    tiny, tmp_path: Path, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = tiny.directory(tmp_path / "m", Lfm2Model(), config=config)
    with pytest.raises(error, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("shortconv.l_cache", None, "key lfm2.shortconv.l_cache is missing"),
        ("shortconv.l_cache", 12, "kernel_size must be 2 to 8, got 12"),
        ("attention.head_count_kv", [0, 2, 0], "must have a number for each of 4 layers"),
        ("attention.head_count_kv", [0, 2, 0, 4], "must be the same in all layers where"),
        ("attention.head_count_kv", [0, 0, 0, 0], "must be the same in all layers where"),
        ("attention.head_count_kv", [0, 2, 2, 0], "missing tensors: blk.2.attn_q.weight"),
    ],
)
def test_files_that_cannot_be_are_refused(
    tiny, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0][f"lfm2.{key}"]
        if isinstance(value, list):
            writer.add_array(f"lfm2.{key}", value)
        elif value is not None:
            writer.add_uint32(f"lfm2.{key}", value)

    path = tiny.gguf(tmp_path / "m.gguf", Lfm2Model(), change=change)
    with pytest.raises(ModelFileError, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_one_number_of_heads_means_that_all_layers_attend(tiny, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["lfm2.attention.head_count_kv"]
        writer.add_head_count_kv(2)

    path = tiny.gguf(tmp_path / "m.gguf", Lfm2Model(), change=change)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q\.weight"):
        load_model(str(path))
