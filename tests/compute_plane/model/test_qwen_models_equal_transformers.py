"""Tiny Qwen2 and Qwen3 models from files: every executor's logits and texts are transformers'."""

from __future__ import annotations

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    made = tiny.model(architecture=request.param, tied=request.param == "qwen2")
    return record(tiny, tmp_path_factory.mktemp(request.param), made, {}, {})


@pytest.mark.parametrize("files", ["directory", "gguf"])
@pytest.mark.parametrize("target", [Target("cpu", "cpu"), STAND_IN], ids=["cpu", "cuda"])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)
