"""Ministral 3: logits and texts are transformers', those of positions at which queries grow too."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import structlog
from gguf.constants import RopeScalingType

from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.json_file import JsonObject
from compute_plane.model.loader import load_model
from compute_plane.model.rope import query_growth
from compute_plane.model.rope_scaling import YarnScaling
from compute_plane.model.spec_faults import faults_of
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

ORIGINAL, BETA = 8, 0.5
"""Positions before queries grow, and how much they do; the texts here are four times as long."""
ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": ORIGINAL, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": BETA,
}  # fmt: skip
CONFIG = {"rope_parameters": ROPE, "sliding_window": None}
KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": ORIGINAL, "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0, "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": BETA,
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory) -> Recorded:
    made = tiny.model(architecture="ministral3", tied=False)
    return record(tiny, tmp_path_factory.mktemp("ministral"), made, CONFIG, KEYS)


@pytest.mark.parametrize("files", ["directory", "gguf"])
@pytest.mark.parametrize("target", [Target("cpu", "cpu"), STAND_IN], ids=["cpu", "cuda"])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_contexts_are_as_long_as_the_files_say(recorded: Recorded, files: str) -> None:
    with structlog.testing.capture_logs() as lines:
        spec = load_model(str(getattr(recorded, files))).spec
    expected = YarnScaling(8.0, ORIGINAL, 1.0, 32.0, 1.0, query_growth=BETA)
    assert spec.rope_scaling == expected
    assert spec.context_length == 512
    assert lines == []


def test_the_factors_of_a_whole_context_are_those_of_transformers() -> None:
    import torch
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    scaling = YarnScaling(16.0, 16384, 1.0, query_growth=0.1)
    spec = replace(tiny_spec(), context_length=262144, rope_scaling=scaling)
    growth = query_growth(spec)
    assert growth is not None
    factors, length = growth
    positions = np.array([0, 1, 16383, 16384, 32767, 32768, 100000, 262143])
    theirs = get_llama_4_attn_scale(torch.from_numpy(positions)[None], 0.1, 16384)
    np.testing.assert_allclose(factors[positions // length], theirs.numpy().reshape(-1), rtol=1e-6)
    assert len(factors) == 16
    assert query_growth(replace(spec, rope_scaling=replace(scaling, query_growth=0.0))) is None


@pytest.mark.parametrize("growth", [-0.1, float("inf"), float("nan"), 1e7])
def test_growth_that_cannot_be_is_named(growth: float) -> None:
    spec = replace(tiny_spec(), rope_scaling=YarnScaling(8.0, 64, 1.0, query_growth=growth))
    assert faults_of(spec) == [f"RoPE query_growth must be 0 to 1e+06, got {growth}"]


@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_one_whose_queries_do_not_grow_has_its_whole_context(tiny, files, tmp_path) -> None:
    made = tiny.model(architecture="ministral3")
    rope = ROPE | {"llama_4_scaling_beta": 0.0}
    keys = KEYS | {"attention.temperature_scale": 0.0}
    both = record(tiny, tmp_path, made, CONFIG | {"rope_parameters": rope}, keys)
    assert load_model(str(getattr(both, files))).spec.context_length == 512


def test_the_text_part_of_a_whole_model_may_be_one(recorded: Recorded, tmp_path) -> None:
    """As it is published: `mistral3` with a `text_config` of `ministral3`."""
    text = json.loads((recorded.directory / "config.json").read_text())
    del text["architectures"]
    whole: dict[str, Any] = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": False,
    }
    for path in recorded.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found, alone = load_model(str(tmp_path)), load_model(str(recorded.directory))
    assert found.spec.rope_scaling == alone.spec.rope_scaling
    assert found.spec.context_length == 512
    name = "model.layers.1.self_attn.q_proj.weight"
    np.testing.assert_array_equal(
        found.source.tensor(name).to_float32(), alone.source.tensor(name).to_float32()
    )


def test_what_a_configuration_leaves_out_is_what_transformers_means(tmp_path) -> None:
    from transformers import Ministral3Config

    said = {"max_position_embeddings": 262144, "num_hidden_layers": 3, "vocab_size": 300}
    said |= {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 8}
    spec = read_hf_spec(JsonObject(tmp_path, said | {"model_type": "ministral3"}), "m")
    theirs = Ministral3Config(**said)
    rope = theirs.rope_parameters
    assert spec.rope_theta == rope["rope_theta"]
    assert spec.rope_scaling == YarnScaling(
        rope["factor"], rope["original_max_position_embeddings"], 1.0, query_growth=0.1
    )
    assert spec.context_length == 262144
    assert (spec.num_kv_heads, spec.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.window is None


def test_a_multiplier_of_another_architecture_is_refused(tiny, tmp_path) -> None:
    def change(writer) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_yarn_log_mul(1.0)

    file = tiny.gguf(tmp_path / "m.gguf", tiny.model(), change=change)
    with pytest.raises(UnsupportedModelError, match=r"yarn_log_multiplier = 1\.0 is not supported"):
        load_model(str(file))


def test_queries_of_other_models_do_not_grow_as_in_transformers(tmp_path) -> None:
    said = {"max_position_embeddings": 512, "num_hidden_layers": 3, "vocab_size": 300}
    said |= {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 8}
    config = JsonObject(tmp_path, said | {"model_type": "llama", "rope_parameters": ROPE})
    scaling = read_hf_spec(config, "m").rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.query_growth == 0


def test_queries_that_grow_without_yarn_are_refused(tiny, tmp_path) -> None:
    made = tiny.model(architecture="ministral3")
    rope = {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}
    directory = tiny.directory(tmp_path / "hf", made, config={"rope_parameters": rope})
    with pytest.raises(
        UnsupportedModelError, match="llama_4_scaling_beta with RoPE scaling linear"
    ):
        load_model(str(directory))
    file = of_keys(tiny, tmp_path, {"attention.temperature_scale": 0.1}, made)
    with pytest.raises(UnsupportedModelError, match=r"temperature_scale with RoPE scaling linear"):
        load_model(str(file))


def of_keys(tiny, folder, keys: dict[str, Any], made):
    """Write a GGUF file that has these keys of its architecture besides."""

    def change(writer) -> None:
        for key, value in keys.items():
            writer.add_float32(f"{made.in_gguf}.{key}", value)

    return tiny.gguf(folder / "m.gguf", made, change=change)
