"""Gemma 4: what its files say and leave out, its text part, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compute_plane.executor.registry import ExecutorContext, build_executor
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.heads import Heads
from compute_plane.model.layer_scale import layer_scale
from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.rope import inverse_frequencies
from planes.errors import ConfigError
from tests.compute_plane.model.gemma4_models import Gemma4Model
from tests.compute_plane.model.models_that_see import write_model_that_sees
from tests.compute_plane.model.recorded_models import PROMPTS, with_keys
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SHARING = {
    "pattern": "SFSFSSF",
    "num_kv_heads": 1,
    "num_sharing": 3,
    "is_double": True,
    "input_size": 16,
    "cap": 30.0,
}


def in_directory(tiny, tmp_path, made: Gemma4Model, config: dict[str, Any]) -> LoadedModel:
    return load_model(str(tiny.directory(tmp_path / "m", made, config=config)))


def in_gguf(tiny, tmp_path, made: Gemma4Model, **keys: Any) -> LoadedModel:
    given = {key.replace("__", "."): value for key, value in keys.items()}

    def change(writer: Any) -> None:
        for key in given:
            writer.kv_data[0].pop(f"gemma4.{key}", None)
        with_keys("gemma4", given)(writer)

    path = tmp_path / "m.gguf"
    return load_model(str(tiny.gguf(path, made, change=change, vectors=made.divisors_in_gguf())))


def both(tiny, tmp_path, **of_model: Any) -> list[LoadedModel]:
    made = Gemma4Model(**of_model)
    return [in_directory(tiny, tmp_path, made, {}), in_gguf(tiny, tmp_path, made)]


def test_files_of_both_kinds_say_the_same_of_layers_that_share(tiny, tmp_path) -> None:
    for model in both(tiny, tmp_path, **SHARING):
        spec = model.spec
        assert spec.kv_sources == (0, 1, 2, 3, 2, 2, 3)
        assert spec.layers_with_keys() == (0, 1, 2, 3)
        assert spec.attending_layers() == tuple(range(7))
        assert [spec.mlp_size_of(layer) for layer in (3, 4)] == [96, 192]
        assert spec.layers_with_window == spec.layers_with_local_rope == {0, 2, 4, 5}
        assert spec.heads_of(0) == spec.heads_of(5) == Heads(4, 1, 16)
        assert spec.heads_of(1) == spec.heads_of(6) == Heads(4, 1, 32)
        assert (spec.logits_cap, spec.layer_input_size, spec.score_scale) == (30.0, 16, 1.0)
        assert (spec.local_rope_theta, spec.rope_theta) == (20.0, 300.0)
        assert "model.layers.4.self_attn.k_proj.weight" not in model.source.names


def test_files_of_both_kinds_say_the_same_of_values_that_are_keys(tiny, tmp_path) -> None:
    of_model = {"global_kv_heads": 1, "keys_are_values": True, "has_experts": True}
    for model in both(tiny, tmp_path, **of_model):
        spec, mixture = model.spec, model.spec.mixture
        assert spec.heads_of(1) == Heads(4, 1, 32)
        assert spec.layers_without_values == {1, 3}
        assert (mixture.num_experts, mixture.experts_per_token) == (5, 2)
        assert (mixture.shared_size, spec.intermediate_size) == (96, 32)
        of_layer = "model.layers.1.self_attn.{}_proj.weight"
        keys, values = (model.source.tensor(of_layer.format(part)) for part in "kv")
        np.testing.assert_array_equal(keys.to_float32(), values.to_float32())


def test_a_quarter_of_the_pairs_of_layers_without_windows_turns(tiny, tmp_path) -> None:
    for model in both(tiny, tmp_path):
        spec = model.spec
        own = inverse_frequencies(_of_global_layers(spec))
        np.testing.assert_allclose(own[:4], 300.0 ** (-np.arange(0, 8, 2) / 32), rtol=1e-6)
        assert (own[4:] < 1e-29).all()


def _of_global_layers(spec):
    return replace(spec, head_dim=32, global_heads=None)


@pytest.mark.parametrize("width", [1, 2])
def test_what_transformers_writes_of_heads_by_layer_is_read(tiny, tmp_path, width: int) -> None:
    """Their numbers are as wide as that of the last, of a model of ten layers or more."""
    made = Gemma4Model()
    config = {
        "global_head_dim": None,
        "num_global_key_value_heads": None,
        "per_layer_config": {f"{layer:0{width}}": {"head_dim": 32} for layer in (1, 3)},
    }
    published = in_directory(tiny, tmp_path, made, {}).spec
    written = made.config() | config
    del written["global_head_dim"], written["num_global_key_value_heads"]
    directory = tiny.directory(tmp_path / "w", made, files={"config.json": written})
    assert replace(load_model(str(directory)).spec, name="m") == published


def test_a_configuration_that_says_nothing_means_what_it_means_in_transformers(
    tiny, tmp_path
) -> None:
    made = Gemma4Model(pattern="SSSSSFSF", head_dim=256, global_head_dim=512, num_kv_heads=4)
    unsaid = (
        "head_dim", "global_head_dim", "layer_types", "rope_parameters", "sliding_window",
        "num_key_value_heads", "final_logit_softcapping", "tie_word_embeddings",
        "num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp",
    )  # fmt: skip
    config = {key: value for key, value in made.config().items() if key not in unsaid}
    config["max_position_embeddings"] = 1024
    spec = load_model(str(tiny.directory(tmp_path / "m", made, files={"config.json": config}))).spec
    assert (spec.window, spec.layers_with_window) == (512, {0, 1, 2, 3, 4, 6})
    assert (spec.rope_theta, spec.local_rope_theta) == (1e6, 1e4)
    assert (spec.heads_of(0), spec.heads_of(5)) == (Heads(4, 4, 256), Heads(4, 4, 512))
    assert (spec.logits_cap, spec.kv_sources, spec.tie_embeddings) == (None, (), True)


def test_the_last_layer_sees_all_whatever_is_said(tiny, tmp_path) -> None:
    made = Gemma4Model()
    kinds = ["sliding_attention", "full_attention", *["sliding_attention"] * 2]
    config = {"layer_types": kinds}
    assert in_directory(tiny, tmp_path, made, config).spec.layers_with_window == {0, 2}


REFUSED_CONFIGS = {
    "attention of both ways": ({"use_bidirectional_attention": "all"}, "bidirectional"),
    "another vocabulary": ({"vocab_size_per_layer_input": 77}, "vocab_size_per_layer_input"),
    "sharing all layers": ({"num_kv_shared_layers": 7}, "must be 0 to 6, got 7"),
    "sharing what is not there": ({"num_kv_shared_layers": 6}, "layer 1 shares keys and values"),
    "a cap of nothing": ({"final_logit_softcapping": 0}, "final_logit_softcapping must be"),
    "inputs too wide": ({"hidden_size_per_layer_input": 1 << 20}, "inputs of layers must be"),
    "an odd head": ({"global_head_dim": 31}, "head_dim must be even"),
    "heads of any size": ({"global_head_dim": 10**12}, "head_dim must be 1 to 4096"),
    "heads that are no groups": ({"per_layer_config": {}}, "missing|shape|has"),
    "one more kind of heads": (
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
        "the same of all layers without windows",
    ),
    "other heads in a window": (
        {"per_layer_config": {"00": {"head_dim": 32}}},
        "layers with windows",
    ),
    "another way to turn": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        "rope_type must be proportional or default, got yarn",
    ),
    "no pair that turns": (
        {"rope_parameters": {"full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0}}},
        "partial_rotary_factor must be greater than 0",
    ),
    "windows that are scaled": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
        "RoPE scaling of layers with windows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_directories_that_cannot_be_are_refused_by_name(tiny, tmp_path, name: str) -> None:
    config, words = REFUSED_CONFIGS[name]
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        in_directory(tiny, tmp_path, Gemma4Model(**SHARING), config)


def test_experts_beside_no_mlp_are_refused(tiny, tmp_path) -> None:
    with pytest.raises(ModelFileError, match="has an MLP for all tokens, got none"):
        in_directory(tiny, tmp_path, Gemma4Model(has_experts=True), {"intermediate_size": 0})


REFUSED_KEYS = {
    "values of another size": ({"attention__value_length": 64}, "must equal the head size 32"),
    "turning in part": ({"rope__dimension_count_swa": 8}, "must equal the head size 16"),
    "kv heads of half the layers": ({"attention__head_count_kv": [1, 1]}, "for each of 7 layers"),
    "kv heads that differ": (
        {"attention__head_count_kv": [1, 1, 2, 1, 1, 1, 1]},
        "must be the same in layers of one kind",
    ),
    "widths that differ": (
        {"feed_forward_length": [96, 96, 96, 80, 192, 192, 192]},
        "must be the same in layers of one kind",
    ),
    "sharing more layers than there are": (
        {"attention__shared_kv_layers": 9},
        "must be 0 to 6, got 9",
    ),
    "a scaling": (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
        "rope.scaling.type",
    ),
}


@pytest.mark.parametrize("name", REFUSED_KEYS)
def test_gguf_files_that_cannot_be_are_refused_by_name(tiny, tmp_path, name: str) -> None:
    keys, words = REFUSED_KEYS[name]
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        in_gguf(tiny, tmp_path, Gemma4Model(**SHARING), **keys)


def test_a_width_may_be_said_of_each_layer_beside_experts_too(tiny, tmp_path) -> None:
    made = Gemma4Model(has_experts=True)
    said = in_gguf(tiny, tmp_path, made, feed_forward_length=[made.intermediate_size] * 4).spec
    assert said.mixture == in_gguf(tiny, tmp_path, made).spec.mixture
    assert said.mixture.shared_size == made.intermediate_size


def test_a_shared_layer_without_the_products_nobody_reads_loads_as_well(tiny, tmp_path) -> None:
    made = Gemma4Model(**SHARING)
    for name in [name for name in made.weights if name.startswith("model.layers.5.self_attn.")]:
        if name.split(".")[4] in ("k_proj", "v_proj", "k_norm"):
            del made.weights[name]
    assert in_directory(tiny, tmp_path, made, {}).spec.kv_source_of(5) == 2
    assert in_gguf(tiny, tmp_path, made).spec.kv_source_of(5) == 2


@pytest.mark.parametrize("global_head_dim", [32, 16])
def test_executors_of_ones_own_are_not_given_them(tiny, tmp_path, global_head_dim: int) -> None:
    """Not even where heads are all of one size: values are normalised there, too."""
    model = in_directory(tiny, tmp_path, Gemma4Model(global_head_dim=global_head_dim), {})
    context = ExecutorContext(
        spec=model.spec, model=model, block_size=16, num_blocks=24, dtype="float32",
        kv_cache_dtype="auto", instruction_set="auto", device="cpu", max_tokens=64, num_threads=1,
        kernel_cache=tmp_path,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="has more than that of others; cpu and cuda do"):
        build_executor("some:executor", context)


TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "sliding_window": 6,
    "max_position_embeddings": 512, "final_logit_softcapping": 20.0, "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "patch_size": 4,
    "pooling_kernel_size": 2,
}  # fmt: skip


def whole_model(kind: str, vocab_size: int) -> Any:
    """Return one of transformers', tiny."""
    import transformers

    text = TEXT | {"vocab_size": vocab_size}
    if kind == "gemma4_unified":
        del text["num_kv_shared_layers"]
        config = transformers.Gemma4UnifiedConfig(text_config=text, eos_token_id=2)
        return transformers.Gemma4UnifiedForConditionalGeneration(config)
    text |= {"vocab_size_per_layer_input": vocab_size, "hidden_size_per_layer_input": 32}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=VISION, audio_config=None, eos_token_id=2
    )
    return transformers.Gemma4ForConditionalGeneration(config)


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_text_part_of_a_whole_model_runs_as_in_transformers(tiny, tmp_path, kind: str) -> None:
    directory, expected = write_model_that_sees(
        tiny, tmp_path, lambda size: whole_model(kind, size)
    )
    assert json.loads((directory / "config.json").read_text())["model_type"] == kind
    model = load_model(str(directory))
    target = Target("cpu", "cpu")
    with target.running(model, num_blocks=8, block_size=16, keep_logits=True) as executor:
        driver = BatchDriver(executor, num_blocks=8, block_size=16)
        batch = driver.batch([DrivenSequence(list(prompt)) for prompt in PROMPTS])
        found = executor.execute(batch).logits
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("files", ["directory", "gguf"])
@pytest.mark.parametrize("pattern", ["FFF", "F"])
def test_heads_are_of_one_kind_where_layers_are(tiny, tmp_path, files: str, pattern: str) -> None:
    made = Gemma4Model(pattern=pattern, global_kv_heads=1, keys_are_values=True)
    if files == "directory":
        spec = in_directory(tiny, tmp_path, made, {}).spec
    else:
        spec = in_gguf(tiny, tmp_path, made).spec
    assert spec.kinds_of_heads == (Heads(4, 1, 32),)
    assert spec.layers_with_window == frozenset()


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_layer_whose_scale_is_no_number_is_a_fault_of_the_file(
    tiny, tmp_path, scale: float
) -> None:
    made = Gemma4Model()
    made.weights["model.layers.1.layer_scalar"][:] = scale
    model = in_directory(tiny, tmp_path, made, {})
    with pytest.raises(ModelFileError, match=r"layers\.1\.layer_scalar holds"):
        layer_scale(model.spec, model.source, 1)
    assert 0.4 < layer_scale(model.spec, model.source, 0) < 1.3
