"""Tiny Granite with windows and sinks: what transformers says, and what files may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [FULL, SLIDING, SLIDING]
SHAPE: dict[str, Any] = {"architecture": "granite_swa", "num_layers": 3, "tied": False}
MULTIPLIERS = {
    "embedding_multiplier": 3, "residual_multiplier": 0.4, "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}  # fmt: skip
CONFIG = {**MULTIPLIERS, "sliding_window": 6, "layer_types": KINDS}
KEYS = {
    "embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.3, "logit_scale": 1.5,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [kind == SLIDING for kind in KINDS],
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all turn": (CONFIG, KEYS),
    "one does not turn": (
        CONFIG | {"layer_rope_theta": [0, 10000.0, 10000.0]},
        KEYS | {"attention.rope_pattern": [False, True, True]},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    config, keys = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, tiny.model(**SHAPE), config, keys)


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def test_layers_may_turn_by_two_bases_or_not_at_all(tiny, tmp_path: Path) -> None:
    made = tiny.model(**SHAPE)
    given = {"layer_rope_theta": [5e5, 0, 1e4], "sliding_window": 6, "layer_types": KINDS}
    spec = load_model(str(tiny.directory(tmp_path / "m", made, config=given))).spec
    assert (spec.rope_theta, spec.local_rope_theta) == (5e5, 1e4)
    assert spec.layers_with_local_rope == {2}
    assert spec.layers_without_rope == {1}
    assert spec.layers_with_window == {1, 2}
    none = {"layer_rope_theta": [0] * 3}
    still = load_model(str(tiny.directory(tmp_path / "m", made, config=none)))
    assert still.spec.layers_without_rope == {0, 1, 2}


def test_every_fourth_layer_from_the_first_sees_all_where_nothing_is_said(
    tiny, tmp_path: Path
) -> None:
    made = tiny.model(**SHAPE | {"num_layers": 6})
    spec = load_model(str(tiny.directory(tmp_path / "m", made))).spec
    assert (spec.window, spec.layers_with_window) == (128, {1, 2, 3, 5})


def test_sinks_are_found_in_both_kinds_of_files(tiny, tmp_path: Path) -> None:
    made = tiny.model(**SHAPE)

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(6)

    stored = made.weights["model.layers.2.self_attn.sinks"]
    file = tiny.gguf(tmp_path / "m.gguf", made, change=change)
    for path in (tiny.directory(tmp_path / "m", made), file):
        source = load_model(str(path)).source
        name = layout.layer_tensor(2, layout.SINKS)
        np.testing.assert_array_equal(source.tensor(name).to_float32(), stored)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"layer_rope_theta": [1.0, 2.0, 3.0]}, UnsupportedModelError, "more than two bases"),
        ({"layer_rope_theta": [1e4] * 2}, ModelFileError, "a number for each of 3 layers"),
        ({"layer_rope_theta": [1e4] * 4}, ModelFileError, "layer_rope_theta must be a list of at"),
        ({"layer_rope_theta": "1"}, ModelFileError, "layer_rope_theta must be a list of at most 3"),
        ({"layer_rope_theta": [0.5, 0.5, 0.5]}, ModelFileError, "rope_theta must be finite and at"),
        ({"layer_types": [FULL] * 2}, ModelFileError, "for each of 3 layers"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias = true"),
    ],
)
def test_configurations_that_cannot_be_or_compute_otherwise_are_refused(
    tiny, tmp_path: Path, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = tiny.directory(tmp_path / "m", tiny.model(**SHAPE), config=config)
    with pytest.raises(error, match=words) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


def test_a_pattern_that_is_not_of_all_layers_is_refused(tiny, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_array("granite_swa.attention.rope_pattern", [True, False])

    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(**SHAPE), change=change)
    with pytest.raises(ModelFileError, match="rope_pattern must have an element for each of 3"):
        load_model(str(path))
