"""Tiny Falcon-H1, whose layers have attention and Mamba-2: logits and texts are transformers'."""

from __future__ import annotations

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.falcon_models import FalconModel
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "norm behind the state"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    made = FalconModel(has_norm=request.param)
    return record(tiny, tmp_path_factory.mktemp("recorded"), made, {}, {})


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("files", "target"), [("directory", CPU), ("gguf", CPU), ("directory", CUDA)]
)
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)
