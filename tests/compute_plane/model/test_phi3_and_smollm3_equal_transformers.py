"""Tiny Phi-3 and SmolLM3 models from files: every executor's logits and texts are transformers'."""

from __future__ import annotations

from typing import Any

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
DIVISORS = [1.0, 1.25, 1.5, 2.0, 3.0, 5.0]
LONG_ROPE = {
    "rope_scaling": {"type": "longrope", "short_factor": DIVISORS, "long_factor": [64.0] * 6},
    "original_max_position_embeddings": 64,
}
OF_LONG_ROPE = {
    "rope.scaling.original_context_length": 64,
    "rope.scaling.attn_factor": (1 + 1 / 2) ** 0.5,  # 512 = 8 · 64, and ln 8 / ln 64 is a half
    "attention.sliding_window": 0,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "phi3": ({"architecture": "phi3", "tied": False}, {}, {}, {}),
    "phi3 that turns 12 of 16 elements, with LongRoPE": (
        {"architecture": "phi3", "rotary_dim": 12},
        LONG_ROPE,
        OF_LONG_ROPE,
        {"rope_factors_short.weight": DIVISORS, "rope_factors_long.weight": [64.0] * 6},
    ),
    "smollm3": ({"architecture": "smollm3", "num_layers": 5}, {}, {}, {}),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys, vectors = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, tiny.model(**of_model), config, keys, vectors)


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


@pytest.fixture(scope="module")
def beyond(tiny, tmp_path_factory) -> Recorded:
    """A model with LongRoPE and texts that are long, for its original length is 2."""
    config = {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [64.0] * 6,
            "long_factor": DIVISORS,
            "attention_factor": 1.25,
        },
        "original_max_position_embeddings": 2,
    }
    keys = OF_LONG_ROPE | {
        "rope.scaling.original_context_length": 2,
        "rope.scaling.attn_factor": 1.25,
    }
    vectors = {"rope_factors_short.weight": [64.0] * 6, "rope_factors_long.weight": DIVISORS}
    made = tiny.model(architecture="phi3", rotary_dim=12)
    return record(tiny, tmp_path_factory.mktemp("beyond"), made, config, keys, vectors)


@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_long_contexts_of_longrope_are_those_of_transformers(
    beyond: Recorded, files: str, target: Target
) -> None:
    path = str(getattr(beyond, files))
    assert load_model(path).spec.context_length == 2
    model = load_model(path, long_context=True)
    assert model.spec.context_length == 512
    assert_same(beyond, model, target)
