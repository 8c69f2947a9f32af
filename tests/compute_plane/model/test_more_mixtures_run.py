"""Tiny OLMoE, MiniMax-M2, K-EXAONE and Solar Open: logits and texts are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.spec import Mixture, ModelSpec
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
DENSE = {"num_layers": 3, "dense_layers": 1}
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "olmoe": ({"architecture": "olmoe", "tied": False}, {}, {}),
    "minimax": ({"architecture": "minimax_m2", "tied": False, "rotary_dim": 8}, {}, {}),
    "exaone": (
        {"architecture": "exaone_moe", "tied": False, **DENSE},
        {"sliding_window": 6, "layer_types": KINDS},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [kind == SLIDING for kind in KINDS],
        },
    ),
    "solar": ({"architecture": "solar_open", "tied": False, "has_extras": False}, {}, {}),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, tiny.model(**of_model), config, keys)


@pytest.mark.spread(5)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def test_files_say_what_a_mixture_is(tiny, tmp_path: Path) -> None:
    of_glm = Mixture(6, 2, True, "sigmoid", 1.75, True, 192)
    expected = {
        "olmoe": Mixture(6, 2, False),
        "minimax_m2": Mixture(6, 2, True, "sigmoid", corrects_choice=True),
        "solar_open": of_glm,
        "exaone_moe": Mixture(6, 2, True, "sigmoid", 1.75, True, 192, False, 1, 80),
    }
    for architecture, mixture in expected.items():
        made = tiny.model(
            architecture=architecture, **(DENSE if mixture.dense_layers else {}), has_extras=False
        )
        folder = tiny.directory(tmp_path / architecture, made)
        file = tiny.gguf(tmp_path / f"{architecture}.gguf", made)
        for path in (folder, file):
            spec = load_model(str(path)).spec
            assert spec.mixture == mixture
            assert spec.intermediate_size == made.intermediate_size
            assert spec.norms_heads_together == (architecture in ("olmoe", "minimax_m2"))
            assert spec.num_parameters == sum(values.size for values in made.weights.values())


def published(tmp_path: Path, model_type: str, **changes: object) -> ModelSpec:
    """Read a config.json with little in it."""
    config = {
        "model_type": model_type, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
        "moe_intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, **changes,
    }  # fmt: skip
    return read_hf_spec(JsonObject(tmp_path / "config.json", config), "m")


def test_what_config_json_does_not_say_is_what_transformers_means(tmp_path: Path) -> None:
    olmoe = published(tmp_path, "olmoe")
    assert (olmoe.mixture, olmoe.intermediate_size) == (Mixture(64, 8, False), 96)
    assert (olmoe.rms_norm_eps, olmoe.rope_theta, olmoe.tie_embeddings) == (1e-5, 10000.0, False)
    minimax = published(tmp_path, "minimax_m2", rotary_dim=64)
    assert minimax.mixture == Mixture(256, 8, scores="sigmoid", corrects_choice=True)
    assert (minimax.head_dim, minimax.rotary_dim, minimax.rope_theta) == (128, 64, 5e6)
    assert published(tmp_path, "minimax_m2").rotary_dim is None
    assert (
        published(tmp_path, "minimax_m2", rotary_dim=64, partial_rotary_factor=0.25).rotary_dim
        == 32
    )
    exaone = published(tmp_path, "exaone_moe", sliding_window=128)
    assert exaone.mixture == Mixture(64, 8, True, "sigmoid", 2.5, True, 48, False, 1, 96)
    assert sorted(exaone.layers_with_window) == [0, 1, 2, 4, 5, 6]
    assert sorted(exaone.layers_without_rope) == [3, 7]
    solar = published(tmp_path, "solar_open")
    assert solar.mixture == Mixture(128, 8, True, "sigmoid", 1.0, True, 48)
    assert (solar.rotary_dim, solar.has_head_norms, solar.has_qkv_bias) == (None, False, False)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"attention_bias": True}, "attention_bias"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type must be per_layer"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func must be sigmoid"),
        ("minimax_m2", {"shared_intermediate_size": 16}, "shared_intermediate_size"),
        ("exaone_moe", {"mlp_layer_types": ["sparse", "dense"] * 4}, "mlp_layer_types"),
    ],
)
def test_what_would_be_another_model_is_refused(tmp_path, model_type, changes, message) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        published(tmp_path, model_type, **changes)


def test_what_predicts_ahead_is_left_out(tiny, tmp_path: Path) -> None:
    made = tiny.model(architecture="exaone_moe", **DENSE)
    count = sum(values.size for values in made.weights.values())
    made.weights["mtp.layers.0.mlp.up_proj.weight"] = made.weights["model.norm.weight"]
    folder = tiny.directory(tmp_path / "m", made, config={"num_nextn_predict_layers": 1})
    assert load_model(str(folder)).spec.num_parameters == count
