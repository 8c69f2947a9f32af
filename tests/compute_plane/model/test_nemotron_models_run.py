"""Tiny Nemotron-H, whose layers are one thing each: logits and texts are transformers'."""

from __future__ import annotations

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.nemotron_models import NemotronModel
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN


@pytest.fixture(scope="module", params=[("M-MM*-", 80), ("ME*EM", 32)], ids=["dense", "experts"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    """Heads of 80 are those of Nemotron Nano 9B v2."""
    pattern, head_dim = request.param
    made = NemotronModel(pattern=pattern, mamba_head_dim=head_dim, tied=False)
    return record(tiny, tmp_path_factory.mktemp("recorded"), made, {}, {})


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)
