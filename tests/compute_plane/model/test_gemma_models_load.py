"""Gemma 3: what its files say and leave out, and what is refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.rope import attention_factors, inverse_frequencies, local_rope

LINEAR = {"rope_type": "linear", "factor": 8.0}


def gemma(tiny, **of_model):
    return tiny.model(architecture="gemma3", **of_model)


def in_directory(tiny, tmp_path, *, num_layers=7, num_kv_heads=2, **config):
    model = gemma(tiny, num_layers=num_layers, num_kv_heads=num_kv_heads)
    return load_model(str(tiny.directory(tmp_path / "m", model, config=config)))


def in_gguf(tiny, tmp_path, *, num_layers=7, **keys):
    def change(writer):
        for key, value in keys.items():
            add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"gemma3.{key.replace('__', '.')}", value)

    path = tiny.gguf(tmp_path / "m.gguf", gemma(tiny, num_layers=num_layers), change=change)
    return load_model(str(path))


def test_a_configuration_that_says_nothing_means_what_it_means_in_transformers(tiny, tmp_path):
    spec = in_directory(
        tiny, tmp_path, num_kv_heads=4, rope_theta=None, num_key_value_heads=None,
        tie_word_embeddings=None, max_position_embeddings=8192,
    ).spec  # fmt: skip
    assert (spec.architecture, spec.rope_theta, spec.local_rope_theta) == ("gemma3", 1e6, 1e4)
    assert (spec.num_kv_heads, spec.tie_embeddings, spec.window) == (4, True, 4096)
    assert spec.layers_with_window == spec.layers_with_local_rope == {0, 1, 2, 3, 4, 6}
    assert spec.score_scale == 1 / 16  # 256 to the power of -1/2, whatever the size of a head


@pytest.mark.parametrize(
    ("dtype", "scale"), [(None, math.sqrt(104)), ("bfloat16", 10.1875), ("float16", 10.195312)]
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_embeddings_factor_is_rounded_to_the_type_of_the_model(
    tiny, tmp_path, key, dtype, scale
):
    model = gemma(tiny, hidden_size=104)
    directory = tiny.directory(tmp_path / "m", model, config={key: dtype})
    assert load_model(str(directory)).spec.embedding_scale == pytest.approx(scale, rel=1e-7)


def test_embeddings_of_gguf_files_have_a_factor_that_is_not_rounded(tiny, tmp_path):
    spec = in_gguf(tiny, tmp_path, attention__sliding_window=64).spec
    assert spec.embedding_scale == 8
    assert spec.score_scale is None
    assert (spec.local_rope_theta, spec.layers_with_local_rope) == (1e4, {0, 1, 2, 3, 4, 6})


def test_scores_of_the_model_of_62_layers_are_scaled_by_its_width(tiny, tmp_path):
    assert in_gguf(tiny, tmp_path, num_layers=62).spec.score_scale == math.sqrt(4 / 64)


def test_layers_without_a_scaling_keep_their_own_base_where_no_context_exceeds_the_window(
    tiny, tmp_path
):
    spec = in_directory(tiny, tmp_path, sliding_window=512, rope_scaling=LINEAR).spec
    assert (spec.window, spec.layers_with_window) == (None, frozenset())
    assert spec.context_length == 512  # the scaling is in it already
    assert spec.layers_with_local_rope == {0, 1, 2, 3, 4, 6}
    whole, local = inverse_frequencies(spec), inverse_frequencies(local_rope(spec))
    assert whole[0] == 1 / 8
    assert local[0] == 1
    np.testing.assert_allclose(local[4], 1e4**-0.5, rtol=1e-6)
    assert (attention_factors(local_rope(spec)) == attention_factors(spec)).all()


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_norms_are_one_more_than_in_a_directory_and_as_in_a_gguf_file(tiny, tmp_path, files):
    model = (in_directory if files == "directory" else in_gguf)(tiny, tmp_path, num_layers=1)
    weights = gemma(tiny, num_layers=1).weights
    prefix = "model.layers.0."
    for role, stored in {
        layout.ATTN_NORM: "input_layernorm",
        layout.ATTN_OUTPUT_NORM: "post_attention_layernorm",
        layout.MLP_NORM: "pre_feedforward_layernorm",
        layout.MLP_OUTPUT_NORM: "post_feedforward_layernorm",
        layout.QUERY_NORM: "self_attn.q_norm",
        layout.KEY_NORM: "self_attn.k_norm",
    }.items():
        found = model.source.tensor(layout.layer_tensor(0, role)).to_float32()
        np.testing.assert_array_equal(found, weights[f"{prefix}{stored}.weight"] + np.float32(1))
    found = model.source.tensor(layout.FINAL_NORM).to_float32()
    np.testing.assert_array_equal(found, weights["model.norm.weight"] + np.float32(1))
    found = model.source.tensor(layout.EMBEDDING).to_float32()
    np.testing.assert_array_equal(found, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh, got silu"),
        ({"model_type": "gemma3"}, "architectures must name Gemma3ForConditionalGeneration"),
        ({"model_type": "gemma2"}, "architectures must name Gemma2ForCausalLM"),
        ({"architectures": ["Gemma3TextModel"]}, "architectures must name Gemma3ForCausalLM"),
        (
            {"rope_parameters": {"sliding_attention": LINEAR, "full_attention": LINEAR}},
            "RoPE scaling of layers with windows is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tiny, tmp_path, config, words):
    with pytest.raises(UnsupportedModelError, match=words):
        in_directory(tiny, tmp_path, **config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be greater than 0, got 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1, got 0"),
        ({"rope_local_base_freq": 0.5}, "local_rope_theta must be finite and at least 1, got 0.5"),
    ],
)
def test_numbers_that_cannot_be_are_a_fault_of_the_file(tiny, tmp_path, config, words):
    with pytest.raises(ModelFileError, match=words):
        in_directory(tiny, tmp_path, **config)


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping"])
def test_softcapping_in_a_gguf_file_is_refused(tiny, tmp_path, key):
    with pytest.raises(UnsupportedModelError, match=f"gemma3.{key} is not supported"):
        in_gguf(tiny, tmp_path, **{key: 30.0})


@pytest.mark.parametrize("window", [{}, {"attention__sliding_window": 0}])
def test_a_gguf_file_without_a_window_has_global_layers_alone(tiny, tmp_path, window):
    """So llama.cpp writes models of which every layer is one; bases and scaling are theirs."""
    spec = in_gguf(tiny, tmp_path, **window).spec
    assert (spec.window, spec.layers_with_window) == (None, frozenset())
    assert spec.layers_with_local_rope == frozenset()


@pytest.mark.parametrize("size", [0, -1, 10**17])
def test_a_width_that_cannot_be_is_named(tiny, tmp_path, size):
    with pytest.raises(ModelFileError, match=f"hidden_size must be 1 to 1048576, got {size}"):
        in_directory(tiny, tmp_path, hidden_size=size)
