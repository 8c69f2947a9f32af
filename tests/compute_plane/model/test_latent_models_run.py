"""Tiny models with attention over latents: logits and texts are transformers'."""

from __future__ import annotations

import json
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model.loader import load_model
from tests.compute_plane.model.latent_models import BOTH, LatentModel
from tests.compute_plane.model.recorded_models import Recorded, assert_same, record
from tests.devices import STAND_IN, Target

CPU, CUDA = Target("cpu", "cpu"), STAND_IN
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
"""Longer than its prompts, so that all of them turn otherwise and scores grow."""
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 4.0,
    "rope.scaling.yarn_log_multiplier": 0.07,
}
SHARP = {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
SHARP_KEYS = {
    "rope.scaling.yarn_beta_fast": 1.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.1,
}
"""As Kimi K2 is published: a frequency is divided or not, with nothing in between."""
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "V3 with groups and YaRN": ({}, True),
    "V2 Lite": ({"architecture": "deepseek_v2", "query_rank": 0, "groups": (1, 1)}, False),
    "V2 with groups, an older file": ({"architecture": "deepseek_v2", "is_older": True}, True),
    "GLM-4.7-Flash": ({"architecture": "glm4_moe_lite", "groups": (1, 1)}, False),
    "Kimi K2": ({"groups": (1, 1), "seed": 4}, True),
    "Youtu": ({"architecture": "youtu", "num_heads": 3}, False),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tiny, tmp_path_factory) -> Recorded:
    own, is_scaled = CASES[request.param]
    folder = tmp_path_factory.mktemp("recorded")
    config = {"rope_scaling": YARN} if is_scaled else {}
    keys = YARN_KEYS if is_scaled else {}
    if request.param != "Kimi K2":
        return record(tiny, folder, LatentModel(**own), config, keys)
    config, keys = {"rope_scaling": YARN | SHARP}, YARN_KEYS | SHARP_KEYS
    found = record(tiny, folder, LatentModel(**own), config, keys)
    path = found.directory / "config.json"  # transformers has no class for it
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    return found


@pytest.mark.spread(3)
@pytest.mark.parametrize(("files", "target"), [("directory", CPU), ("gguf", CPU), ("gguf", CUDA)])
def test_greedy_texts_and_their_logits_are_those_of_transformers(
    recorded: Recorded, files: str, target: Target
) -> None:
    assert_same(recorded, load_model(str(getattr(recorded, files))), target)


def test_matrices_of_heads_that_are_quantised_are_turned_in_sixteen_bits(tiny, tmp_path) -> None:
    """Of an older file: what is turned is what the quantised rows stand for, as a float16."""
    made = LatentModel(architecture="youtu", is_older=True)
    name = f"model.layers.1.{BOTH}"
    rows = gguf.quants.quantize(made.weights[name], GgmlType.Q8_0)
    stored = {name: (rows, GgmlType.Q8_0)}
    source = load_model(str(tiny.gguf(tmp_path / "m.gguf", made, stored=stored))).source
    keys = source.tensor("model.layers.1.self_attn.k_b_proj.weight")
    heads = gguf.quants.dequantize(rows, GgmlType.Q8_0).reshape(made.num_heads, -1, made.rank)
    turned = heads[:, : made.plain].swapaxes(1, 2).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(keys.to_float32(), turned.reshape(-1, made.plain))
    values = source.tensor("model.layers.1.self_attn.v_b_proj.weight")
    np.testing.assert_array_equal(
        values.to_float32(), heads[:, made.plain :].reshape(-1, made.rank)
    )
