"""Tiny OLMo 2 and 3 from files: logits and texts are transformers', and what files may say.

Bases are given by type of layer: of one for all, transformers forgets that of layers with windows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.layout import layer_tensor
from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import YarnScaling
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record, with_keys
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL]
WHOLE_FACTOR = 0.1 * math.log(4.0) + 1
"""Said by configurations of OLMo 3, and therefore by GGUF files of it."""
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "attention_factor": WHOLE_FACTOR, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
YARN_IN_GGUF = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_attn_factor": WHOLE_FACTOR,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
}  # fmt: skip
WINDOWS = {
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [kind == SLIDING for kind in KINDS],
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
OF_TYPES = {"sliding_window": 6, "layer_types": KINDS}
OLMO3 = {"architecture": "olmo3", "tied": False, "num_layers": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "olmo 2": ({"architecture": "olmo2", "tied": False}, {}, {}),
    "olmo 3": (
        OLMO3,
        {**OF_TYPES, "rope_parameters": {SLIDING: PLAIN, FULL: PLAIN}},
        WINDOWS,
    ),
    "olmo 3, yarn": (
        OLMO3,
        {**OF_TYPES, "rope_parameters": {SLIDING: PLAIN, FULL: PLAIN | YARN}},
        WINDOWS | YARN_IN_GGUF,
    ),
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


def test_the_norms_of_heads_are_as_wide_as_all_of_them(tiny, tmp_path: Path) -> None:
    made = tiny.model(architecture="olmo2")
    for path in (tiny.directory(tmp_path / "m", made), tiny.gguf(tmp_path / "m.gguf", made)):
        model = load_model(str(path))
        assert model.spec.norms_heads_together
        for role, name in ((layout.QUERY_NORM, "q_norm"), (layout.KEY_NORM, "k_norm")):
            found = model.source.tensor(layer_tensor(1, role)).to_float32()
            stored = made.weights[f"model.layers.1.self_attn.{name}.weight"]
            np.testing.assert_array_equal(found, stored)


def test_layers_with_windows_have_no_scaling(tiny, tmp_path: Path) -> None:
    made = tiny.model(**OLMO3)
    by_type = {SLIDING: PLAIN | {"rope_theta": 2e4}, FULL: PLAIN | YARN | {"rope_theta": 3e4}}
    flat = {**OF_TYPES, "rope_scaling": YARN}
    nested = {**OF_TYPES, "rope_parameters": by_type}
    for config, theta, local in ((flat, 1e4, 1e4), (nested, 3e4, 2e4)):
        spec = load_model(str(tiny.directory(tmp_path / "m", made, config=config))).spec
        assert isinstance(spec.rope_scaling, YarnScaling)
        assert (spec.rope_theta, spec.local_rope_theta) == (theta, local)
        assert spec.layers_with_local_rope == spec.layers_with_window == {0, 1}


@pytest.mark.parametrize("key", ["yarn_attn_factor", "attn_factor"])
def test_the_factor_of_attention_in_a_gguf_file_is_all_there_is_of_it(
    tiny, tmp_path: Path, key: str
) -> None:
    made = tiny.model(**OLMO3)
    known = {name: YARN_IN_GGUF[name] for name in list(YARN_IN_GGUF)[:3]} | WINDOWS
    name = f"rope.scaling.{key}"
    spec = load_model(
        str(
            tiny.gguf(
                tmp_path / "m.gguf", made, change=with_keys("olmo2", known | {name: WHOLE_FACTOR})
            )
        )
    ).spec
    assert isinstance(spec.rope_scaling, YarnScaling)
    assert spec.rope_scaling.attention_factor == pytest.approx(WHOLE_FACTOR)
    with pytest.raises(UnsupportedModelError, match=rf"{key} = 1\.25 is not supported"):
        load_model(
            str(
                tiny.gguf(
                    tmp_path / "o.gguf", made, change=with_keys("olmo2", known | {name: 1.25})
                )
            )
        )


def test_a_base_of_layers_with_windows_in_a_gguf_file_is_theirs(tiny, tmp_path: Path) -> None:
    keys = WINDOWS | {"rope.freq_base": 3e4, "rope.freq_base_swa": 2e4}
    spec = load_model(
        str(tiny.gguf(tmp_path / "m.gguf", tiny.model(**OLMO3), change=with_keys("olmo2", keys)))
    ).spec
    assert (spec.rope_theta, spec.local_rope_theta) == (3e4, 2e4)


def test_every_fourth_layer_sees_all_where_nothing_is_said(tiny, tmp_path: Path) -> None:
    made = tiny.model(architecture="olmo3", num_layers=5, tied=False)
    spec = load_model(str(tiny.directory(tmp_path / "m", made, config={"sliding_window": 6}))).spec
    assert spec.layers_with_window == {0, 1, 2, 4}
    assert spec.local_rope_theta is None
    plain = load_model(str(tiny.directory(tmp_path / "p", made, config={"sliding_window": None})))
    assert plain.spec.window is None


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias = true"),
        ({"layer_types": [FULL]}, ModelFileError, "for each of 3 layers"),
        (
            {"rope_parameters": {SLIDING: YARN, FULL: YARN}, "layer_types": KINDS},
            UnsupportedModelError,
            "RoPE scaling of layers with windows is not supported",
        ),
        (
            {"rope_parameters": YARN},
            UnsupportedModelError,
            "must have an object for full_attention and sliding_attention, got rope_type, factor",
        ),
    ],
)
def test_models_that_compute_otherwise_are_refused(
    tiny, tmp_path: Path, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = tiny.directory(tmp_path / "m", tiny.model(**OLMO3), config=config)
    with pytest.raises(error, match=words):
        load_model(str(path))
