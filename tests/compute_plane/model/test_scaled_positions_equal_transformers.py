"""Tiny models with scaled rotary positions: every executor's logits and texts are transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import LinearScaling, YarnScaling, yarn_attention_factor
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
IN_GGUF = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}


@dataclass(frozen=True)
class Case:
    """One scaling, as both kinds of files say it. `length`: of the contexts they say that of."""

    architecture: str
    config: dict[str, Any]
    keys: dict[str, Any]
    length: int = 512


CASES = {
    "linear": Case(
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
        1280,
    ),
    "linear of an older file": Case(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
        {"rope.scale_linear": 3.0},
        1536,
    ),
    "yarn": Case("qwen2", {"rope_scaling": YARN}, IN_GGUF),
    "yarn, all said": Case(
        "qwen3",
        {"rope_parameters": YARN | {"rope_theta": 10000.0, "beta_fast": 4, "beta_slow": 0.5}},
        IN_GGUF | {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5},
    ),
    "yarn, nothing said": Case(
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0},
        4096,
    ),
}


def of_keys(tiny, folder, keys: dict[str, Any], architecture: str = "llama") -> Path:
    """Write a GGUF file that has these keys of its architecture besides."""

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"{architecture}.{key}", value, kind)

    return tiny.gguf(folder / "m.gguf", tiny.model(architecture=architecture), change=change)


def written(tiny, folder, case: Case) -> list[str]:
    """Write both kinds of files."""
    made = tiny.model(architecture=case.architecture)
    directory = tiny.directory(folder / "m", made, config=case.config)
    return [str(directory), str(of_keys(tiny, folder, case.keys, case.architecture))]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_kinds_of_files_say_the_same(tiny, tmp_path, case):
    of_directory, of_gguf = (load_model(path) for path in written(tiny, tmp_path, case))
    assert of_directory.spec.rope_scaling == of_gguf.spec.rope_scaling
    assert of_directory.spec.rope_scaling is not None
    for model in (of_directory, of_gguf):
        assert model.spec.context_length == case.length


@pytest.fixture(scope="module", params=["linear of an older file", "yarn, all said"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    case = CASES[request.param]
    made = tiny.model(architecture=case.architecture)
    return record(tiny, tmp_path_factory.mktemp("scaled"), made, case.config, case.keys)


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def of_config(tiny, tmp_path, **config):
    return load_model(str(tiny.directory(tmp_path / "m", tiny.model(), config=config))).spec


def test_what_a_person_adds_holds_before_what_was_there(tiny, tmp_path):
    spec = of_config(
        tiny,
        tmp_path,
        rope_scaling={"type": "linear", "factor": 2.0},
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    assert spec.rope_scaling == LinearScaling(2.0)
    assert spec.rope_theta == 5e5


def test_the_original_length_beside_a_scaling_holds_before_the_one_in_it(tiny, tmp_path):
    beside = {"original_max_position_embeddings": 32}
    spec = of_config(tiny, tmp_path, rope_scaling=YARN, **beside)
    assert spec.rope_scaling == YarnScaling(4.0, 32, yarn_attention_factor(4.0))


def test_a_scaling_that_says_nothing_is_none(tiny, tmp_path):
    spec = of_config(tiny, tmp_path, rope_scaling={}, rope_parameters={"rope_theta": 5e5})
    assert (spec.rope_scaling, spec.rope_theta) == (None, 5e5)


def test_yarn_without_a_factor_takes_that_of_the_lengths(tiny, tmp_path):
    scaling = YARN | {"factor": None, "attention_factor": None, "truncate": False, "beta_fast": 0}
    spec = of_config(tiny, tmp_path, rope_scaling=scaling)
    expected = YarnScaling(32.0, 16, yarn_attention_factor(32.0), truncate=False)
    assert spec.rope_scaling == expected
    assert spec.context_length == 512


REFUSED = {
    "RoPE scaling dynamic is not supported: its frequencies change": {"rope_type": "dynamic"},
    "RoPE scaling mrope is not supported; supported are default, linear": {"type": "mrope"},
    "partial rotary positions": {"rope_type": "yarn", "partial_rotary_factor": 0.5},
    "rotary positions that differ from layer to layer": {"full_attention": {"rope_theta": 1e6}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_another_scaling_is_refused_by_name(tiny, tmp_path, words):
    with pytest.raises(UnsupportedModelError) as caught:
        of_config(tiny, tmp_path, rope_scaling=REFUSED[words])
    assert words in caught.value.message


WRONG = {
    "rope_scaling.factor is missing": {"type": "linear"},
    "RoPE factor must be 1e-06 to 1e+06, got -1.0": {"type": "linear", "factor": -1},
    "RoPE attention_factor must be 1e-06": YARN | {"attention_factor": -1.0},
    "RoPE beta_slow must not be above beta_fast, got 9.0 and 4.0": YARN
    | {"beta_fast": 4, "beta_slow": 9},
    "original_max_position_embeddings must be 1 to": YARN | {"original_max_position_embeddings": 0},
}


@pytest.mark.parametrize("words", WRONG)
def test_numbers_that_cannot_be_are_faults_of_the_file(tiny, tmp_path, words):
    with pytest.raises(ModelFileError) as caught:
        of_config(tiny, tmp_path, rope_scaling=WRONG[words])
    assert words in caught.value.message


GGUF_REFUSED = {
    "RoPE scaling mrope is not supported; supported are none": {"rope.scaling.type": "mrope"},
    "llama.rope.scaling.attn_factor = 0.5 is not": {"rope.scaling.attn_factor": 0.5},
    "llama.rope.scaling.yarn_attn_factor = 0.5 is not": {"rope.scaling.yarn_attn_factor": 0.5},
    "llama.rope.scaling.yarn_ext_factor = 0.0 is not": IN_GGUF
    | {"rope.scaling.yarn_ext_factor": 0.0},
    "llama.rope.scaling.yarn_log_multiplier = 0.5": {"rope.scaling.yarn_log_multiplier": 0.5},
}


@pytest.mark.parametrize("words", GGUF_REFUSED)
def test_a_file_with_another_scaling_is_refused_by_name(tiny, tmp_path, words):
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(of_keys(tiny, tmp_path, GGUF_REFUSED[words])))
    assert words in caught.value.message


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.factor": 0.0, "rope.scale_linear": 1.0},
    ],
)
def test_a_scaling_by_one_is_none(tiny, tmp_path, keys):
    spec = load_model(str(of_keys(tiny, tmp_path, keys))).spec
    assert (spec.rope_scaling, spec.context_length) == (None, 512)


def test_yarn_without_a_factor_is_a_fault_of_the_file(tiny, tmp_path):
    path = of_keys(tiny, tmp_path, {"rope.scaling.type": "yarn"})
    with pytest.raises(ModelFileError, match=r"key llama\.rope\.scaling\.factor is missing"):
        load_model(str(path))
