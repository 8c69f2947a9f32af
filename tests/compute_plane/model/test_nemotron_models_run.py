"""Tiny Nemotron-H, whose layers are one thing each: logits and texts are transformers'."""

from __future__ import annotations

import pytest

from compute_plane.model.loader import load_model
from tests.compute_plane.model.nemotron_models import NemotronModel
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import Target

CPU = Target("cpu", "cpu")


@pytest.fixture(scope="module", params=["M-MM*-", "ME*EM"], ids=["dense", "experts"])
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    return record(tiny, folder, NemotronModel(pattern=request.param, tied=False), {}, {})


@pytest.mark.spread(2)
@pytest.mark.parametrize("files", ["directory", "gguf"])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), CPU)
