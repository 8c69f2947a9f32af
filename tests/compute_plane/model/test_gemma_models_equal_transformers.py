"""Tiny Gemma 2 and 3 from files: every executor's logits and texts are transformers'."""

from __future__ import annotations

from typing import Any

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
SCALAR = {"query_pre_attn_scalar": 16}
"""GGUF files have no key for it: there it is the size of a head."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "with a scaling of global layers": (
        {"num_layers": 4},
        {
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 5000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 5000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "as newer configurations say it": (
        {"num_layers": 3, "tied": False},
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
        {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [False, True, True],
            "rope.freq_base": 300.0,
            "rope.freq_base_swa": 20.0,
        },
    ),
    "Gemma 2": (
        {"architecture": "gemma2", "num_layers": 3},
        {"sliding_window": 6, "attn_logit_softcapping": 0.8, "final_logit_softcapping": 3.0},
        {
            "attention.sliding_window": 6,
            "attn_logit_softcapping": 0.8,
            "final_logit_softcapping": 3.0,
        },
    ),
    "Gemma 2 that says nothing of caps": (
        {"architecture": "gemma2", "num_layers": 2},
        {"sliding_window": 8},
        {"attention.sliding_window": 8},
    ),
    "that says nothing": (
        {"num_layers": 7},
        {"sliding_window": 8, "rope_theta": 1e6},
        {"attention.sliding_window": 8, "rope.freq_base": 1e6},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys = CASES[request.param]
    made = tiny.model(**{"architecture": "gemma3", **of_model})
    return record(tiny, tmp_path_factory.mktemp("gemma"), made, SCALAR | config, keys)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("files", "target"), [("directory", CPU), ("gguf", CPU), ("directory", CUDA), ("gguf", CUDA)]
)
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    model = load_model(str(getattr(recorded, files)))
    assert model.spec.window < len(recorded.tokens[1])  # of the shorter text
    assert_same(recorded, model, target)
