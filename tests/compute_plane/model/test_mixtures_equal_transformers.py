"""Tiny mixtures of experts from files: logits and texts are transformers'."""

from __future__ import annotations

from typing import Any

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
MULTIPLIERS = {
    "embedding_multiplier": 3,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 1.5,
}
KEYS = {
    "embedding_scale": 3.0,
    "residual_scale": 0.22,
    "attention.scale": 0.4,
    "logit_scale": 1.5,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"architecture": "mixtral", "tied": False}, {}, {}),
    "qwen3": ({"architecture": "qwen3_moe"}, {}, {}),
    "qwen3, weights over all experts": (
        {"architecture": "qwen3_moe", "num_experts": 9},
        {"norm_topk_prob": False, "num_experts_per_tok": 5},
        {"expert_weights_norm": False, "expert_used_count": 5},
    ),
    "granite": ({"architecture": "granitemoe", "tied": False}, MULTIPLIERS, KEYS),
    "one expert": (
        {"architecture": "qwen3_moe", "num_experts": 1},
        {"num_experts_per_tok": 1},
        {"expert_used_count": 1},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    of_model, config, keys = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, tiny.model(**of_model), config, keys)


@pytest.mark.spread(4)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)
