"""Granite: its multipliers are read, and what is more than a decoder is refused."""

from __future__ import annotations

import numpy as np
import pytest

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.rope import attention_factors
from tests.compute_plane.model.group_checkpoints import Scheme, checkpoint

CONFIG = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
KEYS = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.015625,
    "logit_scale": 8.0,
}


def in_directory(tiny, tmp_path, architecture="granite", **config):
    model = tiny.model(architecture=architecture)
    return load_model(str(tiny.directory(tmp_path / "m", model, config=config)))


def in_gguf(tiny, tmp_path, **keys):
    def change(writer):
        for key, value in keys.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_float32
            add(f"granite.{key}", value)

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(architecture="granite"), change=change)
    return load_model(str(path))


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_multipliers_become_scales_and_an_epsilon(tiny, tmp_path, files):
    model = (
        in_directory(tiny, tmp_path, **CONFIG)
        if files == "directory"
        else in_gguf(tiny, tmp_path, **KEYS)
    )
    spec = model.spec
    assert spec.architecture == "granite"
    assert spec.embedding_scale == pytest.approx(12 / 0.22)
    assert spec.rms_norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert (spec.score_scale, spec.logits_scale) == (0.015625, 0.125)
    factors = attention_factors(spec)
    np.testing.assert_allclose(factors**2, np.full(8, 0.015625 * 4), rtol=1e-6)


def test_scores_keep_the_factor_of_a_scaling_of_positions(tiny, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "rope_theta": 10000.0}
    model = in_directory(tiny, tmp_path, **CONFIG, rope_scaling=yarn)
    expected = np.full(8, (0.015625 * 4) ** 0.5 * 1.25)
    np.testing.assert_allclose(attention_factors(model.spec), expected, rtol=1e-6)


def test_a_file_without_multipliers_has_what_its_readers_take(tiny, tmp_path):
    """For llama.cpp scores are as usual, and 0 says nothing; for transformers all are 1."""
    for keys in ({}, dict.fromkeys(KEYS, 0.0)):
        spec = in_gguf(tiny, tmp_path, **keys).spec
        assert (spec.embedding_scale, spec.logits_scale, spec.score_scale) == (1, 1, None)
        assert spec.rms_norm_eps == pytest.approx(1e-5)
    spec = in_directory(tiny, tmp_path).spec
    assert (spec.embedding_scale, spec.logits_scale, spec.score_scale) == (1, 1, 1)


@pytest.mark.parametrize("name", CONFIG)
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-5, 1e5])
def test_a_multiplier_that_cannot_be_is_named(tiny, tmp_path, name, value):
    word = name.removesuffix("_multiplier").removesuffix("_scaling")
    with pytest.raises(ModelFileError, match=f"the multiplier of {word} must be 0.0001 to 10000"):
        in_directory(tiny, tmp_path, **{name: value})


def test_a_gguf_files_too(tiny, tmp_path):
    with pytest.raises(ModelFileError, match="the multiplier of residual must be"):
        in_gguf(tiny, tmp_path, residual_scale=-0.5)


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_multipliers_are_refused_where_the_architecture_has_none(tiny, tmp_path, key):
    path = tiny.gguf(
        tmp_path / "m.gguf", tiny.model(), change=lambda w: w.add_float32(f"llama.{key}", 1.0)
    )
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} is not supported"):
        load_model(str(path))


def test_the_mlp_of_granite_4_is_found_under_its_own_names(tiny, tmp_path):
    model = tiny.model(architecture="granitemoehybrid")
    loaded = load_model(str(tiny.directory(tmp_path / "m", model)))
    stored = model.weights["model.layers.1.shared_mlp.input_linear.weight"]
    down = model.weights["model.layers.1.shared_mlp.output_linear.weight"]
    for part, rows in {"gate": stored[:96], "up": stored[96:], "down": down}.items():
        tensor = loaded.source.tensor(f"model.layers.1.mlp.{part}_proj.weight")
        np.testing.assert_array_equal(tensor.to_float32(), rows)
    assert loaded.spec.num_parameters == sum(values.size for values in model.weights.values())
    assert loaded.spec.layers_without_rope == frozenset()


def test_group_wise_matrices_of_granite_4_are_found_under_their_own_names(tiny, tmp_path):
    model = tiny.model(architecture="granitemoehybrid")
    made = checkpoint(model.weights, Scheme())
    settings_of = {"quantization_config": made.scheme.config()}
    directory = tiny.directory(tmp_path / "m", model, config=settings_of)
    made.save(directory / "model.safetensors")
    found = load_model(str(directory)).source.tensor("model.layers.1.mlp.down_proj.weight")
    expected = made.weights["model.layers.1.shared_mlp.output_linear.weight"]
    np.testing.assert_array_equal(found.to_float32(), expected)


def test_granite_without_rotary_positions_turns_in_no_layer(tiny, tmp_path):
    config = {"position_embedding_type": None}
    of_directory = in_directory(tiny, tmp_path, "granitemoehybrid", **config).spec
    of_gguf = in_gguf(tiny, tmp_path, **{"rope.scaling.finetuned": False}).spec
    assert of_directory.layers_without_rope == of_gguf.layers_without_rope == {0, 1}
    turning = in_gguf(tiny, tmp_path, **{"rope.scaling.finetuned": True}).spec
    assert turning.layers_without_rope == frozenset()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"architectures": ["GraniteForCausalLM"]}, "must name GraniteMoeHybridForCausalLM"),
    ],
)
def test_a_granite_4_that_computes_otherwise_is_refused(tiny, tmp_path, config, words):
    with pytest.raises(UnsupportedModelError, match=words):
        in_directory(tiny, tmp_path, "granitemoehybrid", **config)


def test_a_gguf_file_cannot_name_what_only_directories_have(tiny, tmp_path):
    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model(),
        change=lambda w: w.add_string("general.architecture", "granitemoehybrid"),
        skip_keys=("general.architecture",),
    )
    with pytest.raises(
        UnsupportedModelError, match=r"granitemoehybrid is not supported; .*granite"
    ):
        load_model(str(path))
