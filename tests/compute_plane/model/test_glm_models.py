"""Tiny GLM-4 models from files: every executor's logits and texts are transformers'."""

from __future__ import annotations

import numpy as np
import pytest

from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
CONFIG = {"attention_bias": True, "pad_token_id": 0}
TURNING = 8
"""Elements of a head of 16; 0.5 of them, as where nothing is said."""


@pytest.fixture(scope="module", params=["a half turns", "three quarters turn"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    turning = TURNING if request.param == "a half turns" else 12
    made = tiny.model(architecture="glm4", tied=False, rotary_dim=turning)
    config = CONFIG | ({"partial_rotary_factor": 0.5} if turning == TURNING else {})
    return record(tiny, tmp_path_factory.mktemp("glm"), made, config, {})


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def test_biases_of_queries_and_keys_are_in_the_order_of_their_rows(tiny, tmp_path) -> None:
    """Of a head of 16, of which 8 turn by neighbours: first the even ones of those that turn."""
    made = tiny.model(architecture="glm4", rotary_dim=TURNING)
    name = "model.layers.0.self_attn.q_proj.bias"
    made.weights[name][:] = np.arange(len(made.weights[name]))
    order = [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    expected = np.concatenate([16 * head + np.array(order) for head in range(4)])
    for path in (
        tiny.directory(tmp_path / "hf", made, config=CONFIG),
        tiny.gguf(tmp_path / "m.gguf", made),
    ):
        found = load_model(str(path)).source.tensor(name).to_float32()
        np.testing.assert_array_equal(found, expected)


def test_what_a_configuration_leaves_out_is_what_transformers_means(tmp_path) -> None:
    from transformers import Glm4Config

    said = {"max_position_embeddings": 512, "num_hidden_layers": 3, "vocab_size": 300}
    said |= {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 8}
    spec = read_hf_spec(JsonObject(tmp_path, said | {"model_type": "glm4"}), "m")
    theirs = Glm4Config(**said, pad_token_id=0, eos_token_id=1)
    assert spec.num_turning == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (spec.num_kv_heads, spec.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert spec.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_one_without_biases_runs_too(tiny, tmp_path, files: str, target: Target) -> None:
    """GLM-4-32B-0414 and GLM-Z1-32B have none."""
    made = tiny.model(architecture="glm4", rotary_dim=TURNING)
    for name in [name for name in made.weights if name.endswith(".bias")]:
        del made.weights[name]
    both = record(tiny, tmp_path, made, CONFIG | {"attention_bias": False}, {})
    model = load_model(str(getattr(both, files)))
    assert not model.spec.has_qkv_bias
    assert_same(both, model, target)


def test_one_that_sees_is_refused_for_its_converter_lays_rows_otherwise(tiny, tmp_path) -> None:
    def change(writer) -> None:
        writer.add_rope_dimension_sections([2, 1, 1, 0])

    made = tiny.model(architecture="glm4", rotary_dim=TURNING)
    file = tiny.gguf(tmp_path / "m.gguf", made, change=change)
    with pytest.raises(UnsupportedModelError, match=r"glm4\.rope\.dimension_sections"):
        load_model(str(file))
