"""Tiny EXAONE 4, ERNIE 4.5 and Seed-OSS models from files: logits and texts are transformers'."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.pre_tokenizers import WORD_SPLITS
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ernie": ({"architecture": "ernie4_5"}, {}, {}),
    "seed": ({"architecture": "seed_oss", "tied": False}, {}, {}),
    "exaone": (
        {"architecture": "exaone4"},
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        {},
    ),
    "exaone with windows": (
        {"architecture": "exaone4", "tied": False, "num_layers": 3},
        {"sliding_window": 6, "layer_types": SLIDING},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [kind == SLIDING[0] for kind in SLIDING],
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, tiny.model(**of_model), config, keys)


@pytest.mark.spread(8)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CUDA), ("gguf", CPU)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def spec_of(folder, model_type: str, **said: Any) -> ModelSpec:
    usual = {"max_position_embeddings": 512, "num_hidden_layers": 9, "vocab_size": 300}
    usual |= {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4}
    return read_hf_spec(JsonObject(folder, usual | said | {"model_type": model_type}), "m")


@pytest.mark.parametrize(
    ("model_type", "name", "heads"),
    [
        ("ernie4_5", "Ernie4_5Config", 4),
        ("seed_oss", "SeedOssConfig", 8),
        ("exaone4", "Exaone4Config", 32),
    ],
)
def test_what_a_configuration_leaves_out_is_what_transformers_means(
    tmp_path, model_type: str, name: str, heads: int
) -> None:
    import transformers

    said = {"hidden_size": 128, "num_attention_heads": heads, "num_hidden_layers": 9}
    theirs = getattr(transformers, name)(**said)
    spec = spec_of(tmp_path, model_type, **said)
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.head_dim == getattr(theirs, "head_dim", 128 // heads)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    assert spec.has_qkv_bias == getattr(theirs, "attention_bias", False)


@pytest.mark.parametrize(
    ("said", "window", "windows", "still"),
    [
        ({"sliding_window": None}, None, [], []),
        ({"sliding_window": 64}, 64, [0, 1, 2, 4, 5, 6, 8], [3, 7]),
        ({"sliding_window": 64, "sliding_window_pattern": 3}, 64, [0, 1, 3, 4, 6, 7], [2, 5, 8]),
        (
            {"sliding_window": 64, "sliding_window_pattern": "LLLG"},
            64,
            [0, 1, 2, 4, 5, 6],
            [3, 7, 8],
        ),
        ({"sliding_window": 64, "sliding_window_pattern": "GL"}, 64, [1, 3, 5, 7], [0, 2, 4, 6, 8]),
        # No context is longer; what does not turn stays so.
        ({}, None, [], [3, 7]),
    ],
)
def test_layers_of_exaone_without_windows_do_not_turn(
    tmp_path, said: dict[str, Any], window: int | None, windows: list[int], still: list[int]
) -> None:
    spec = spec_of(tmp_path, "exaone4", num_key_value_heads=2, **said)
    assert spec.window == window
    assert sorted(spec.layers_with_window) == windows
    assert sorted(spec.layers_without_rope) == still


@pytest.mark.parametrize(
    ("model_type", "said", "error", "words"),
    [
        ("exaone4", {"sliding_window_pattern": 0}, ModelFileError, "pattern must be at least 1"),
        ("exaone4", {"sliding_window_pattern": "LX"}, ModelFileError, "sliding_window_pattern"),
        ("exaone4", {"layer_types": ["full_attention"]}, ModelFileError, "each of 9 layers"),
        ("ernie4_5", {"use_bias": True}, UnsupportedModelError, "use_bias = true"),
        ("seed_oss", {"attention_out_bias": True}, UnsupportedModelError, "attention_out_bias"),
    ],
)
def test_what_such_a_configuration_says_and_cannot_be_is_named(
    tmp_path, model_type: str, said: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        spec_of(tmp_path, model_type, num_key_value_heads=2, **said)


def test_a_file_of_exaone_that_names_a_window_has_it_in_three_layers_of_four(
    tiny, tmp_path
) -> None:
    def change(writer) -> None:
        writer.add_sliding_window(64)

    made = tiny.model(architecture="exaone4", num_layers=5)
    spec = load_model(str(tiny.gguf(tmp_path / "m.gguf", made, change=change))).spec
    assert sorted(spec.layers_with_window) == [0, 1, 2, 4]
    assert spec.layers_without_rope == {3}


def test_a_directory_of_ernie_may_have_the_name_of_before(tiny, tmp_path) -> None:
    made = tiny.model(architecture="ernie4_5")
    before = {"architectures": ["Ernie4_5_ForCausalLM"]}
    assert (
        load_model(str(tiny.directory(tmp_path / "hf", made, config=before))).spec.num_layers == 2
    )


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("exaone4", "it's  12!\n a", ["it", "'s", "Ġ", "Ġ12", "!", "Ċ", "Ġa"]),
        ("seed-coder", "it's  12!\n\na", ["it", "'s", "Ġ", "Ġ", "1", "2", "!", "ĊĊ", "a"]),
    ],
)
def test_words_of_files_are_cut_as_their_tokenizers_cut_them(
    tiny, kind: str, text: str, words: list[str]
) -> None:
    document = tiny.tokenizer() | {"pre_tokenizer": WORD_SPLITS[kind].pre_tokenizer}
    cut = Tokenizer.from_str(json.dumps(document)).pre_tokenizer
    assert cut is not None
    assert [word for word, _ in cut.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_a_norm_before_attention_has_no_place_in_an_exaone(tiny, tmp_path, files: str) -> None:
    made = tiny.model(architecture="exaone4")
    made.weights["model.layers.1.input_layernorm.weight"] = np.ones(64, np.float32)
    path = tiny.directory(tmp_path / "hf", made)
    if files == "gguf":
        path = tiny.gguf(tmp_path / "m.gguf", made)
    with pytest.raises(ModelFileError, match="a EXAONE 4 model does not have"):
        load_model(str(path))
