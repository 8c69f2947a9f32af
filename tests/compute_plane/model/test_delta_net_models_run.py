"""Tiny models with Gated DeltaNet: logits and texts are transformers'."""

from __future__ import annotations

from typing import Any

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.delta_net_models import DeltaNetModel
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
CASES: dict[str, dict[str, Any]] = {
    "qwen3.5": {"architecture": "qwen3_5_text"},
    "qwen3.5 moe": {"architecture": "qwen3_5_moe_text", "num_value_heads": 8},
    "qwen3-next": {"architecture": "qwen3_next"},
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, DeltaNetModel(**CASES[request.param]), {}, {})


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)
