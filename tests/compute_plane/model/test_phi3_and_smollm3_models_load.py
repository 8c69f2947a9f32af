"""Phi-3 and SmolLM3: what their files hold otherwise is read, and nothing else is let through."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType
from structlog.testing import capture_logs

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import LongContexts, LongRopeScaling
from tests.compute_plane.model.group_checkpoints import Scheme, checkpoint

FUSED = "model.layers.1.self_attn.qkv_proj.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ORIGINAL = "phi3.rope.scaling.original_context_length"


def phi3(tiny, **of_model):
    return tiny.model(architecture="phi3", **of_model)


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q8_0, GgmlType.Q4_1], ids=str)
def test_the_matrices_of_phi3_are_rows_of_those_that_a_file_holds(tiny, tmp_path, kind):
    model = phi3(tiny)
    whole = model.weights[FUSED]
    inner = model.weights["model.layers.1.mlp.gate_up_proj.weight"]
    loaded = load_model(str(tiny.gguf(tmp_path / "m.gguf", model, kind)))
    source = loaded.source
    assert not any("qkv_proj" in name or "gate_up" in name for name in source.names)
    assert loaded.spec.num_parameters == sum(values.size for values in model.weights.values())
    for part, rows in {
        "self_attn.q_proj": whole[:64],
        "self_attn.k_proj": whole[64:96],
        "self_attn.v_proj": whole[96:],
        "mlp.gate_proj": inner[:96],
        "mlp.up_proj": inner[96:],
    }.items():
        tensor = source.tensor(f"model.layers.1.{part}.weight")
        assert tensor.shape == rows.shape
        step = 0 if kind == GgmlType.F32 else 0.4
        np.testing.assert_allclose(tensor.to_float32(), rows, rtol=0, atol=step)
        np.testing.assert_array_equal(tensor.rows(slice(3, 9)), tensor.rows()[3:9])
        np.testing.assert_array_equal(tensor.rows(np.array([5, 2])), tensor.rows()[[5, 2]])


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_rows_of_heads_that_turn_in_part_lie_so_that_halves_turn(tiny, tmp_path, files):
    model = phi3(tiny, rotary_dim=12)
    path = getattr(tiny, files)(tmp_path / "m.gguf", model)
    loaded = load_model(str(path))
    assert loaded.spec.num_turning == 12
    order = [*range(6), 12, 13, *range(6, 12), 14, 15]
    for part, first, count in (("q", 0, 64), ("k", 64, 32), ("v", 96, 32)):
        rows = loaded.source.tensor(f"model.layers.1.self_attn.{part}_proj.weight").to_float32()
        expected = model.weights[FUSED][first : first + count].reshape(-1, 16, 64)
        if part != "v":
            expected = expected[:, order]
        np.testing.assert_array_equal(rows, expected.reshape(count, 64))


def test_a_group_wise_checkpoint_of_phi3_has_its_fused_matrices_in_parts(tiny, tmp_path):
    model = phi3(tiny)
    made = checkpoint(model.weights, Scheme())
    settings_of = {"quantization_config": made.scheme.config()}
    directory = tiny.directory(tmp_path / "m", model, config=settings_of)
    made.save(directory / "model.safetensors")
    source = load_model(str(directory)).source
    found = [
        source.tensor(f"model.layers.1.self_attn.{part}_proj.weight").to_float32() for part in "qkv"
    ]
    np.testing.assert_array_equal(np.concatenate(found), made.weights[FUSED])


def test_a_fused_matrix_of_another_shape_and_one_in_parts_are_named(tiny, tmp_path):
    model = phi3(tiny)
    whole = model.weights.pop(FUSED)
    for count, path in enumerate((tiny.directory, tiny.gguf)):
        with pytest.raises(ModelFileError, match=r"missing tensors: (model.*qkv_proj|blk.*qkv)"):
            load_model(str(path(tmp_path / f"{count}.gguf", model)))
    model.weights[FUSED] = whole[:-1].copy()
    with pytest.raises(ModelFileError, match=r"qkv_proj.* has shape \[127, 64\].*\[128, 64\]"):
        load_model(str(tiny.directory(tmp_path / "m", model)))
    model.weights[FUSED] = whole
    model.weights["model.layers.1.self_attn.q_proj.weight"] = whole[:64]
    with pytest.raises(ModelFileError, match=r"a Phi-3 model does not have: .*q_proj"):
        load_model(str(tiny.directory(tmp_path / "n", model)))


CONTEXTS = {
    "none": ({}, 512, None),
    "a window": ({"sliding_window": 300}, 512, 300),
    "no window": ({"sliding_window": None}, 512, None),
    "long factors": (
        {
            "rope_scaling": {"type": "su", "short_factor": [1] * 8, "long_factor": [2.0] * 8},
            "original_max_position_embeddings": 128,
        },
        128,
        None,
    ),
    "both": (
        {
            "rope_scaling": {"type": "yarn", "short_factor": [1] * 8, "long_factor": [2.0] * 8},
            "original_max_position_embeddings": 128,
            "sliding_window": 100,
        },
        128,
        100,
    ),
}


@pytest.mark.parametrize("what", CONTEXTS)
def test_contexts_of_phi3_end_where_positions_would_turn_otherwise(tiny, tmp_path, what):
    config, length, window = CONTEXTS[what]
    spec = load_model(str(tiny.directory(tmp_path / "m", phi3(tiny), config=config))).spec
    assert (spec.context_length, spec.window) == (length, window)
    assert isinstance(spec.rope_scaling, LongRopeScaling) == ("rope_scaling" in config)


def test_a_file_of_phi3_from_before_windows_were_written_has_the_one_its_model_has(tiny, tmp_path):
    def said(name: str, context_length: int, **keys: int) -> int | None:
        def change(writer):
            writer.kv_data[0]["phi3.context_length"].value = context_length
            for key, value in keys.items():
                writer.add_uint32(f"phi3.attention.{key}", value)

        path = tiny.gguf(tmp_path / f"{name}.gguf", phi3(tiny), change=change)
        return load_model(str(path)).spec.window

    assert said("old", 4096) == 2047
    assert said("none", 4096, sliding_window=0) is None
    assert said("own", 4096, sliding_window=1000) == 1000
    assert said("longer", 8192) is None


def test_long_factors_of_a_gguf_file_are_read_with_what_goes_with_them(tiny, tmp_path):
    def change(writer):
        writer.add_uint32(ORIGINAL, 64)
        writer.add_float32("phi3.rope.scaling.attn_factor", 1.25)

    vectors = {SHORT: [1.5] * 8, LONG: [3.0] * 8}
    path = tiny.gguf(tmp_path / "m.gguf", phi3(tiny), change=change, vectors=vectors)
    spec = load_model(str(path)).spec
    long = LongContexts((3.0,) * 8, 512)
    assert spec.rope_scaling == LongRopeScaling((1.5,) * 8, 64, 1.25, long)
    assert spec.context_length == 64
    spec = load_model(str(path), long_context=True).spec
    assert spec.rope_scaling == LongRopeScaling((3.0,) * 8, 64, 1.25, is_long=True)
    assert spec.context_length == 512


def test_who_does_not_ask_for_long_contexts_is_told_how_to(tiny, tmp_path):
    config = CONTEXTS["long factors"][0]
    path = str(tiny.directory(tmp_path / "m", phi3(tiny), config=config))
    hint = "--long-context, and --max-model-len as long as they shall be"
    for asks, told in ((False, [(hint, 128, 512)]), (True, [])):
        with capture_logs() as lines:
            load_model(path, long_context=asks)
        assert [
            (line["hint"], line["max_model_len"], line["context_length"]) for line in lines
        ] == told
    plain = str(tiny.directory(tmp_path / "n", phi3(tiny)))
    with capture_logs() as lines:
        assert load_model(plain, long_context=True).spec == load_model(plain).spec
    assert lines == []


def test_a_long_context_may_have_a_window_that_a_short_one_does_not_fill(tiny, tmp_path):
    config = CONTEXTS["long factors"][0] | {"sliding_window": 256}
    path = str(tiny.directory(tmp_path / "m", phi3(tiny), config=config))
    assert load_model(path).spec.window is None
    spec = load_model(path, long_context=True).spec
    assert (spec.context_length, spec.window) == (512, 256)
    assert spec.way_of_turning == "/long-context"


def test_where_no_context_is_longer_none_turns_otherwise(tiny, tmp_path):
    config = CONTEXTS["long factors"][0] | {"original_max_position_embeddings": 512}
    path = str(tiny.directory(tmp_path / "m", phi3(tiny), config=config))
    assert load_model(path, long_context=True).spec == load_model(path).spec


def test_long_contexts_that_the_files_do_not_know_are_refused(tiny, tmp_path):
    scaling = {"type": "longrope", "short_factor": [1.0] * 8}
    path = str(tiny.directory(tmp_path / "m", phi3(tiny), config={"rope_scaling": scaling}))
    load_model(path)
    with pytest.raises(UnsupportedModelError, match=r"--long-context: .* no factors of long"):
        load_model(path, long_context=True)


@pytest.mark.parametrize(
    ("vectors", "keys", "words"),
    [
        ({LONG: [1.0] * 8}, {ORIGINAL: 64}, f"missing tensors: {SHORT}"),
        ({SHORT: [1.0] * 8}, {}, f"{ORIGINAL} is missing"),
        ({SHORT: [1.0] * 7}, {ORIGINAL: 64}, "each of 8 pairs of a head, got 7"),
        ({SHORT: [1.0] * 8, LONG: [1.0] * 9}, {ORIGINAL: 64}, "each of 8 pairs of a head, got 9"),
        ({SHORT: [1.0] * 8}, {ORIGINAL: 64, "phi3.rope.scaling.type": "yarn"}, "together"),
        ({SHORT: [1.0] * 8, "rope_freqs.weight": [1.0] * 8}, {ORIGINAL: 64}, "together"),
        ({}, {"phi3.rope.dimension_count": 7}, "even number of elements, 2 to head_dim"),
        ({}, {"phi3.rope.dimension_count": 18}, r"2 to head_dim \(16\), got 18"),
    ],
)
def test_what_a_gguf_file_says_of_positions_and_cannot_be_is_named(
    tiny, tmp_path, vectors, keys, words
):
    def change(writer):
        for key, value in keys.items():
            writer.kv_data[0].pop(key, None)
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)

    path = tiny.gguf(tmp_path / "m.gguf", phi3(tiny), change=change, vectors=vectors)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        load_model(str(path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "short_factor is missing"),
        ({"rope_scaling": {"type": "su", "short_factor": 3}}, "must be a list of at most 4096"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0, "x"]}},
            r"short_factor\[1\] must be a number, got 'x'",
        ),
        ({"partial_rotary_factor": 0.0}, "must be greater than 0 and at most 1, got 0.0"),
        ({"partial_rotary_factor": 1e308}, r"greater than 0 and at most 1, got 1e\+308"),
        ({"partial_rotary_factor": 0.2}, r"2 to head_dim \(16\), got 3"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"architectures": ["PhiMoEForCausalLM"]}, "must name Phi3ForCausalLM"),
    ],
)
def test_what_a_configuration_of_phi3_says_and_cannot_be_is_named(tiny, tmp_path, config, words):
    with pytest.raises((ModelFileError, UnsupportedModelError), match=words):
        load_model(str(tiny.directory(tmp_path / "m", phi3(tiny), config=config)))


def test_heads_that_turn_in_part_are_refused_where_the_architecture_has_none(tiny, tmp_path):
    model = tiny.model(rotary_dim=12)
    with pytest.raises(UnsupportedModelError, match="partial rotary positions"):
        load_model(str(tiny.directory(tmp_path / "m", model)))
    with pytest.raises(UnsupportedModelError, match="dimension_count must equal the head size 16"):
        load_model(str(tiny.gguf(tmp_path / "m.gguf", model)))


UNTURNED = {
    "nothing said": ({}, {3, 7}),
    "an interval": ({"no_rope_layer_interval": 3}, {2, 5}),
    "a list": ({"no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0, 0, 0]}, {0, 7}),
    "null": ({"no_rope_layers": None}, {3, 7}),
}


@pytest.mark.parametrize("what", UNTURNED)
def test_a_configuration_of_smollm3_says_which_layers_have_no_positions(tiny, tmp_path, what):
    config, layers = UNTURNED[what]
    model = tiny.model(architecture="smollm3", num_layers=8)
    spec = load_model(str(tiny.directory(tmp_path / "m", model, config=config))).spec
    assert spec.layers_without_rope == layers


def test_of_a_gguf_file_of_smollm3_it_is_every_fourth_layer(tiny, tmp_path):
    model = tiny.model(architecture="smollm3", num_layers=8)
    spec = load_model(str(tiny.gguf(tmp_path / "m.gguf", model))).spec
    assert spec.layers_without_rope == {3, 7}


def test_what_a_configuration_of_smollm3_leaves_out_is_what_transformers_takes(tiny, tmp_path):
    model = tiny.model(architecture="smollm3", num_kv_heads=4)
    silent = {"num_key_value_heads": None, "tie_word_embeddings": None, "rope_theta": None}
    spec = load_model(str(tiny.directory(tmp_path / "m", model, config=silent))).spec
    assert (spec.num_kv_heads, spec.tie_embeddings, spec.rope_theta) == (4, True, 2e6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"no_rope_layers": [1]}, "no_rope_layers must be 0 or 1 for each of 2 layers"),
        ({"no_rope_layers": [1, 2]}, "no_rope_layers must be 0 or 1"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval must be at least 1, got 0"),
    ],
)
def test_what_a_configuration_of_smollm3_says_and_cannot_be_is_named(tiny, tmp_path, config, words):
    model = tiny.model(architecture="smollm3")
    with pytest.raises(ModelFileError, match=words):
        load_model(str(tiny.directory(tmp_path / "m", model, config=config)))


@pytest.mark.parametrize(("window", "layers"), [(100, {1, 3}), (None, set())])
def test_windows_of_smollm3_are_in_layers_without_rotary_positions(tiny, tmp_path, window, layers):
    model = tiny.model(architecture="smollm3", num_layers=4)
    config = {"use_sliding_window": True, "no_rope_layer_interval": 2, "sliding_window": window}
    spec = load_model(str(tiny.directory(tmp_path / "m", model, config=config))).spec
    assert (spec.window, spec.layers_with_window) == (window, layers)
