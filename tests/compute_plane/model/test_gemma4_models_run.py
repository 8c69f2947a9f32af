"""Tiny Gemma 4, with all that one of them has: logits and texts are transformers'."""

from __future__ import annotations

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.gemma4_models import Gemma4Model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import Target

TARGETS = Target("cpu", "cpu"), Target("cuda", "cpu")
CASES = {
    "31B": {"global_kv_heads": 1, "keys_are_values": True, "cap": 3.0},
    "E2B": {
        "pattern": "SFSFSSF",
        "num_kv_heads": 1,
        "num_sharing": 3,
        "is_double": True,
        "input_size": 16,
        "cap": 30.0,
    },
    "26B-A4B": {"global_kv_heads": 1, "keys_are_values": True, "has_experts": True},
    "experts apart": {"pattern": "SF", "has_experts": True, "is_fused": False},
    "heads of one size": {"pattern": "SF", "global_head_dim": 16},
    "E4B": {"pattern": "SSFSF", "num_sharing": 2, "input_size": 32},
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    made = Gemma4Model(**CASES[request.param])
    return record(tiny, tmp_path_factory.mktemp("recorded"), made, {}, {}, made.divisors_in_gguf())


@pytest.mark.spread(1)
@pytest.mark.parametrize("files", ["directory", "gguf"])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.executor)
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    model = load_model(str(getattr(recorded, files)))
    assert model.spec.window < len(recorded.tokens[1])  # of the shorter text
    assert_same(recorded, model, target)
