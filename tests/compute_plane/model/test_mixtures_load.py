"""Mixtures of experts: found under the names of files, refused where they compute otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.layout_checks import check_layout
from compute_plane.model.loader import load_model
from compute_plane.model.spec import Mixture
from tests.compute_plane.model.group_checkpoints import Scheme, checkpoint

ARCHITECTURES = ("mixtral", "qwen3_moe", "granitemoe")


def in_directory(tiny, tmp_path, architecture="qwen3_moe", **config):
    model = tiny.model(architecture=architecture)
    return load_model(str(tiny.directory(tmp_path / "m", model, config=config)))


def in_gguf(tiny, tmp_path, architecture="qwen3_moe", skip_keys=(), **keys):
    model = tiny.model(architecture=architecture)

    def change(writer):
        for key, value in keys.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add[type(value)](f"{model.in_gguf}.{key}", value)

    skipped = tuple(f"{model.in_gguf}.{key}" for key in skip_keys)
    path = tiny.gguf(tmp_path / "m.gguf", model, change=change, skip_keys=skipped)
    return load_model(str(path))


def experts_of(model, layer=1):
    """Return gate, up and down of each expert, and the router, from the model's own weights."""
    prefix = f"model.layers.{layer}."
    if model.architecture == "granitemoe":
        fused = model.weights[prefix + "block_sparse_moe.input_linear.weight"]
        down = model.weights[prefix + "block_sparse_moe.output_linear.weight"]
        router = model.weights[prefix + "block_sparse_moe.router.layer.weight"]
        inner = model.intermediate_size
        return [
            (both[:inner], both[inner:], d) for both, d in zip(fused, down, strict=True)
        ], router
    block, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if model.architecture == "mixtral":
        block, names = "block_sparse_moe", ("w1", "w3", "w2")
    experts = [
        [model.weights[f"{prefix}{block}.experts.{e}.{name}.weight"] for name in names]
        for e in range(model.num_experts)
    ]
    return experts, model.weights[f"{prefix}{block}.gate.weight"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_router_and_experts_are_found_under_the_names_of_the_files(
    tiny, tmp_path, architecture, files
):
    model = tiny.model(architecture=architecture)
    if files == "directory":
        loaded = load_model(str(tiny.directory(tmp_path / "m", model)))
    else:
        loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", model)))
    experts, router = experts_of(model)
    tensor = loaded.source.tensor
    np.testing.assert_array_equal(tensor("model.layers.1.mlp.gate.weight").to_float32(), router)
    for number, matrices in enumerate(experts):
        for part, rows in zip(("gate", "up", "down"), matrices, strict=True):
            name = f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"
            assert tensor(name).shape == rows.shape
            np.testing.assert_array_equal(tensor(name).to_float32(), rows)
    assert set(loaded.source.names) >= {
        f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(6)
    }
    assert loaded.spec.mixture == Mixture(6, 2)
    assert loaded.spec.intermediate_size == 96
    assert loaded.spec.num_parameters == sum(values.size for values in model.weights.values())


def test_quantised_experts_of_a_file_are_their_rows(tiny, tmp_path):
    model = tiny.model(architecture="qwen3_moe")
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", model, GgmlType.Q8_0)))
    assert loaded.spec.weight_format == "Q8_0"
    found = loaded.source.tensor("model.layers.0.mlp.experts.5.down_proj.weight")
    expected = model.weights["model.layers.0.mlp.experts.5.down_proj.weight"]
    np.testing.assert_allclose(found.to_float32(), expected, atol=0.02)


def test_group_wise_experts_are_found(tiny, tmp_path):
    model = tiny.model(architecture="mixtral")
    made = checkpoint(model.weights, Scheme())
    settings_of = {"quantization_config": made.scheme.config()}
    directory = tiny.directory(tmp_path / "m", model, config=settings_of)
    made.save(directory / "model.safetensors")
    found = load_model(str(directory)).source.tensor("model.layers.1.mlp.experts.3.up_proj.weight")
    expected = made.weights["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    np.testing.assert_array_equal(found.to_float32(), expected)


def test_what_configurations_say_nothing_of_is_what_transformers_takes(tiny, tmp_path):
    """Qwen's own files call the count num_experts; their weights are over all experts."""
    spec = in_directory(
        tiny, tmp_path, num_local_experts=None, num_experts=6, norm_topk_prob=None
    ).spec
    assert spec.mixture == Mixture(6, 2, normalises_weights=False)
    (tmp_path / "b").mkdir()
    assert in_directory(tiny, tmp_path / "b", "mixtral", num_experts_per_tok=None).spec.mixture == (
        Mixture(6, 2)
    )


def test_a_gguf_file_may_say_the_width_of_an_expert_in_either_key(tiny, tmp_path):
    spec = in_gguf(tiny, tmp_path, "mixtral", ["expert_feed_forward_length"]).spec
    assert spec.intermediate_size == 96
    assert (spec.architecture, spec.mixture) == ("llama", Mixture(6, 2))


CONFIG_FAULTS = [
    ({"num_experts_per_tok": 7}, ModelFileError, "experts_per_token must be 1 to 6, got 7"),
    ({"num_experts_per_tok": 0}, ModelFileError, "experts_per_token must be 1 to 6, got 0"),
    ({"num_local_experts": 0}, ModelFileError, "num_experts must be 1 to 1024, got 0"),
    ({"num_local_experts": 1025}, ModelFileError, "num_experts must be 1 to 1024, got 1025"),
    ({"num_local_experts": 7}, ModelFileError, r"missing tensors: .*experts\.6\.gate_proj"),
    ({"num_local_experts": 5}, ModelFileError, r"mlp\.gate\.weight has shape \[6, 64\]"),
    ({"mlp_only_layers": [1]}, UnsupportedModelError, "layers without experts"),
    ({"decoder_sparse_step": 2}, UnsupportedModelError, "layers without experts"),
]


@pytest.mark.parametrize(("config", "error", "words"), CONFIG_FAULTS)
def test_configurations_that_cannot_be_are_refused_in_one_line(
    tiny, tmp_path, config, error, words
):
    with pytest.raises(error, match=words) as caught:
        in_directory(tiny, tmp_path, **config)
    assert "\n" not in str(caught.value)


KEY_FAULTS = [
    ({"expert_used_count": 9}, ModelFileError, "experts_per_token must be 1 to 6, got 9"),
    ({"expert_shared_count": 1}, UnsupportedModelError, "expert_shared_count = 1"),
    (
        {"expert_shared_feed_forward_length": 64},
        UnsupportedModelError,
        "expert_shared_feed_forward_length = 64",
    ),
    ({"leading_dense_block_count": 1}, UnsupportedModelError, "leading_dense_block_count = 1"),
    ({"expert_group_count": 2}, UnsupportedModelError, "expert_group_count = 2"),
    ({"expert_gating_func": 2}, UnsupportedModelError, r"must be 1 \(softmax\), got 2"),
    ({"expert_weights_scale": 2.5}, UnsupportedModelError, "expert_weights_scale"),
]


@pytest.mark.parametrize(("keys", "error", "words"), KEY_FAULTS)
def test_gguf_files_that_compute_otherwise_are_refused(tiny, tmp_path, keys, error, words):
    with pytest.raises(error, match=words):
        in_gguf(tiny, tmp_path, **keys)


@pytest.mark.parametrize("key", ["expert_count", "expert_used_count"])
def test_a_gguf_file_says_how_many_experts(tiny, tmp_path, key):
    with pytest.raises(ModelFileError, match=f"key qwen3moe.{key} is missing"):
        in_gguf(tiny, tmp_path, skip_keys=[key])


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_keys_that_change_nothing_are_taken(tiny, tmp_path, scale):
    spec = in_gguf(
        tiny, tmp_path, expert_gating_func=1, expert_weights_scale=scale, expert_group_count=1
    ).spec
    assert spec.mixture == Mixture(6, 2)


def test_experts_are_refused_where_an_architecture_has_none(tiny, tmp_path):
    def change(writer):
        writer.add_expert_count(8)

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(architecture="qwen2"), change=change)
    with pytest.raises(UnsupportedModelError, match="mixtures of experts are not supported"):
        load_model(str(path))


def test_a_model_without_experts_has_the_width_of_its_mlp(tiny, tmp_path):
    """Whatever its file says of experts that it does not have."""

    def change(writer):
        writer.add_expert_count(0)
        writer.add_expert_feed_forward_length(32)

    spec = load_model(str(tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=change))).spec
    assert (spec.mixture, spec.intermediate_size) == (None, 96)


def test_more_experts_than_a_model_has_are_refused_before_they_are_named(tiny, tmp_path):
    """The names of 4096 layers with 1024 experts would take gigabytes."""
    spec = in_gguf(tiny, tmp_path).spec
    many = replace(spec, num_layers=65, mixture=Mixture(1024, 2))
    words = "experts of all layers must be at most 65536 together, got 66560"
    with pytest.raises(ModelFileError, match=words):
        check_layout(tmp_path, many, dict.fromkeys(map(str, range(99))), str, in_gguf=True)


def test_granite_with_experts_and_without_rotary_positions_turns_in_no_layer(tiny, tmp_path):
    keys = {"rope.scaling.finetuned": False}
    assert in_gguf(tiny, tmp_path, "granitemoe", **keys).spec.layers_without_rope == {0, 1}
    keys = {"rope.scaling.finetuned": True}
    assert not in_gguf(tiny, tmp_path, "granitemoe", **keys).spec.layers_without_rope
