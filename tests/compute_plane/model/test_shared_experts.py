"""Tiny mixtures with experts that all tokens share: logits and texts are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.spec import Mixture, ModelSpec
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
THREE = {"num_layers": 3, "dense_layers": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2": ({"architecture": "qwen2_moe", "tied": False}, {"norm_topk_prob": False}, {}),
    "ernie": ({"architecture": "ernie4_5_moe", **THREE}, {}, {}),
    "glm": ({"architecture": "glm4_moe", "rotary_dim": 8, **THREE}, {}, {}),
    "glm air": (
        {"architecture": "glm4_moe", "rotary_dim": 8, "has_extras": False, "tied": False, **THREE},
        {},
        {},
    ),
    "dots": (
        {"architecture": "dots1", "tied": False, **THREE},
        {"norm_topk_prob": False, "sliding_window": None},
        {"expert_weights_norm": False},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, tiny.model(**of_model), config, keys)


@pytest.mark.spread(2)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def test_files_say_what_a_mixture_is(tiny, tmp_path: Path) -> None:
    """Both kinds of files of each; how wide shared experts are, tensors of GGUF files say."""
    dense = {"dense_layers": 1, "dense_size": 80}
    glm = Mixture(6, 2, True, "sigmoid", 1.75, True, 192, **dense)
    expected = {
        "qwen2_moe": Mixture(6, 2, False, shared_size=48, gates_shared=True),
        "glm4_moe": glm,
        "dots1": glm,
        "ernie4_5_moe": Mixture(6, 2, corrects_choice=True, shared_size=192, **dense),
    }
    for architecture, mixture in expected.items():
        shape = THREE if mixture.dense_layers else {}
        made = tiny.model(architecture=architecture, **shape)
        config = {"norm_topk_prob": False} if architecture == "qwen2_moe" else {}
        folder = tiny.directory(tmp_path / architecture, made, config=config)
        file = tiny.gguf(tmp_path / f"{architecture}.gguf", made)
        for path in (folder, file):
            spec = load_model(str(path)).spec
            assert spec.mixture == mixture
            assert spec.intermediate_size == made.intermediate_size
            assert spec.num_parameters == sum(values.size for values in made.weights.values())


@pytest.mark.parametrize("architecture", ["qwen2_moe", "ernie4_5_moe"])
@pytest.mark.parametrize("leaves_rows", [False, True])
def test_vectors_of_gguf_files_may_be_a_row(
    tiny, tmp_path: Path, architecture: str, leaves_rows: bool
) -> None:
    """As converters write them; quantisers take the row away."""
    made = tiny.model(architecture=architecture, leaves_rows=leaves_rows)
    file = load_model(str(tiny.gguf(tmp_path / "m.gguf", made))).source
    folder = load_model(str(tiny.directory(tmp_path / "m", made))).source
    for name in folder.names:
        one, other = file.tensor(name), folder.tensor(name)
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.to_float32(), other.to_float32())


@pytest.mark.parametrize("architecture", ["qwen2_moe", "glm4_moe"])
def test_older_files_say_what_experts_of_a_token_have_together(
    tiny, tmp_path: Path, architecture: str
) -> None:
    made = tiny.model(architecture=architecture)

    def change(writer) -> None:
        writer.kv_data[0].pop(f"{made.in_gguf}.expert_feed_forward_length")
        writer.kv_data[0][f"{made.in_gguf}.feed_forward_length"].value = 2 * 96

    spec = load_model(str(tiny.gguf(tmp_path / "m.gguf", made, change=change))).spec
    assert spec.intermediate_size == 96


@pytest.mark.parametrize("files", ["directory", "gguf"])
@pytest.mark.parametrize("architecture", ["glm4_moe", "ernie4_5_moe"])
def test_layers_that_a_file_does_not_count_have_no_place(
    tiny, tmp_path: Path, architecture: str, files: str
) -> None:
    made = tiny.model(architecture=architecture, **THREE)
    path = tiny.directory(tmp_path / "m", made, config={"num_hidden_layers": 2})
    if files == "gguf":

        def change(writer) -> None:
            writer.kv_data[0][f"{made.in_gguf}.block_count"].value = 2

        path = tiny.gguf(tmp_path / "m.gguf", made, change=change)
    with pytest.raises(ModelFileError, match=r"model does not have|biases are not supported"):
        load_model(str(path))


@pytest.mark.parametrize("files", ["directory", "gguf"])
@pytest.mark.parametrize("architecture", ["glm4_moe", "ernie4_5_moe"])
def test_layers_that_predict_ahead_are_left_out(
    tiny, tmp_path: Path, architecture: str, files: str
) -> None:
    made = tiny.model(architecture=architecture, **THREE)
    num_parameters = sum(values.size for values in made.weights.values())
    if files == "directory":
        ahead = {
            "glm4_moe": ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight"),
            "ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
        }
        made.weights |= {name: np.ones((3, 3), np.float32) for name in ahead[architecture]}
        path = tiny.directory(tmp_path / "m", made, config={"num_nextn_predict_layers": 1})
    else:

        def change(writer) -> None:
            writer.add_uint32(f"{made.in_gguf}.nextn_predict_layers", 1)
            writer.kv_data[0][f"{made.in_gguf}.block_count"].value = 4

        names = ("blk.3.nextn.eh_proj.weight", "blk.3.attn_norm.weight")
        vectors = {name: np.ones(3) for name in names}
        path = tiny.gguf(tmp_path / "m.gguf", made, change=change, vectors=vectors)
    spec = load_model(str(path)).spec
    assert (spec.num_layers, spec.num_parameters) == (3, num_parameters)


def test_tensors_behind_the_last_layer_have_no_place_where_nothing_predicts_ahead(
    tiny, tmp_path: Path
) -> None:
    made = tiny.model(architecture="dots1", **THREE)
    made.weights["model.layers.3.eh_proj.weight"] = np.ones((3, 3), np.float32)
    with pytest.raises(ModelFileError, match=r"a dots\.llm1 model does not have"):
        load_model(str(tiny.directory(tmp_path / "m", made)))


def in_directory(tiny, folder: Path, architecture: str, **config: Any) -> LoadedModel:
    made = tiny.model(architecture=architecture, **THREE)
    return load_model(str(tiny.directory(folder / "m", made, config=config)))


@pytest.mark.parametrize(
    ("architecture", "config", "error", "words"),
    [
        ("glm4_moe", {"n_group": 4}, ModelFileError, "num_groups must divide 6 experts, got 4"),
        ("glm4_moe", {"topk_group": 4}, ModelFileError, "groups_per_token must be 1 to 1, got 4"),
        ("glm4_moe", {"first_k_dense_replace": 3}, ModelFileError, "0 to 2, of 3 layers, got 3"),
        ("glm4_moe", {"first_k_dense_replace": 0}, ModelFileError, "missing tensors: .*layers.0"),
        ("glm4_moe", {"routed_scaling_factor": 0}, ModelFileError, "weight_scale must be 1e-06 to"),
        ("glm4_moe", {"routed_scaling_factor": 1e308}, ModelFileError, "to 1e.06, got 1e.308"),
        ("glm4_moe", {"n_shared_experts": -1}, ModelFileError, "shared_size must be 0 to"),
        ("glm4_moe", {"n_shared_experts": 1}, ModelFileError, "has shape .*the model needs"),
        ("dots1", {"n_routed_experts": None}, ModelFileError, "num_local_experts"),
        ("dots1", {"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, UnsupportedModelError, "moe_layer_interval"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, UnsupportedModelError, "moe_layer_end_index"),
    ],
)
def test_configurations_that_cannot_be_or_compute_otherwise_are_refused(
    tiny, tmp_path: Path, architecture: str, config: dict[str, Any], error: type[Exception],
    words: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=words) as caught:
        in_directory(tiny, tmp_path, architecture, **config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("glm4_moe", {"expert_gating_func": 1}, r"must be 2 \(sigmoid\), got 1"),
        ("qwen2_moe", {"expert_gating_func": 2}, r"must be 1 \(softmax\), got 2"),
        ("ernie4_5_moe", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step = 2"),
    ],
)
def test_gguf_files_that_compute_otherwise_are_refused(
    tiny, tmp_path: Path, architecture: str, keys: dict[str, int], words: str
) -> None:
    made = tiny.model(architecture=architecture, num_layers=1)

    def change(writer) -> None:
        for key, value in keys.items():
            writer.kv_data[0].pop(f"{made.in_gguf}.{key}", None)
            writer.add_uint32(f"{made.in_gguf}.{key}", value)

    with pytest.raises(UnsupportedModelError, match=words):
        load_model(str(tiny.gguf(tmp_path / "m.gguf", made, change=change)))


def spec_of(folder: Path, model_type: str, **said: Any) -> ModelSpec:
    usual: dict[str, Any] = {"num_hidden_layers": 9, "vocab_size": 300, "hidden_size": 128}
    usual |= {"intermediate_size": 64, "num_attention_heads": 32, "moe_intermediate_size": 48}
    usual["max_position_embeddings"] = 512
    return read_hf_spec(JsonObject(folder, usual | said | {"model_type": model_type}), "m")


@pytest.mark.parametrize(
    ("model_type", "name", "said"),
    [
        ("qwen2_moe", "Qwen2MoeConfig", {}),
        ("glm4_moe", "Glm4MoeConfig", {}),
        ("ernie4_5_moe", "Ernie4_5_MoeConfig", {}),
        (
            "dots1",
            "Dots1Config",
            {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 2},
        ),
    ],
)
def test_what_a_configuration_leaves_out_is_what_transformers_means(
    tmp_path: Path, model_type: str, name: str, said: dict[str, Any]
) -> None:
    import transformers

    numbers = {"hidden_size": 128, "num_attention_heads": 32, "num_hidden_layers": 9}
    numbers |= {"moe_intermediate_size": 48, "intermediate_size": 64, **said}
    theirs = getattr(transformers, name)(**numbers)
    spec = spec_of(tmp_path, model_type, **said)
    mixture = spec.mixture
    assert mixture is not None
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert spec.tie_embeddings == theirs.tie_word_embeddings
    assert spec.num_turning == spec.head_dim * theirs.rope_parameters.get(
        "partial_rotary_factor", 1.0
    )
    count = getattr(theirs, "num_local_experts", None) or theirs.num_experts
    assert mixture.num_experts == count
    assert mixture.experts_per_token == theirs.num_experts_per_tok
    assert mixture.normalises_weights == getattr(theirs, "norm_topk_prob", True)
    assert mixture.weight_scale == getattr(theirs, "routed_scaling_factor", 1.0)
    first = getattr(theirs, "first_k_dense_replace", getattr(theirs, "moe_layer_start_index", 0))
    assert mixture.dense_layers == first
    shared = {
        "qwen2_moe": lambda: theirs.shared_expert_intermediate_size,
        "ernie4_5_moe": lambda: 48 * theirs.moe_num_shared_experts,
    }.get(model_type, lambda: 48 * theirs.n_shared_experts)
    assert mixture.shared_size == shared()
    assert not spec.layers_with_window
    has_bias = getattr(theirs, "attention_bias", getattr(theirs, "qkv_bias", False))
    assert spec.has_qkv_bias == has_bias
    assert spec.has_head_norms == (model_type == "dots1")


@pytest.mark.parametrize(
    ("model_type", "said", "window", "layers"),
    [
        ("dots1", {"max_window_layers": 6}, None, []),  # no context is longer
        ("dots1", {"max_window_layers": 6, "sliding_window": 64}, 64, [6, 7, 8]),
        ("dots1", {"sliding_window": 64}, None, []),
        ("qwen2_moe", {"sliding_window": 64}, None, []),
        ("qwen2_moe", {"sliding_window": 64, "use_sliding_window": True}, 64, [0, 2, 4, 6, 8]),
        (
            "qwen2_moe",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
            64,
            [0, 2],
        ),
    ],
)
def test_windows_are_in_the_layers_that_transformers_gives_them(
    tmp_path: Path, model_type: str, said: dict[str, Any], window: int | None, layers: list[int]
) -> None:
    said = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, **said}
    spec = spec_of(tmp_path, model_type, **said)
    assert spec.window == window
    assert sorted(spec.layers_with_window) == layers
