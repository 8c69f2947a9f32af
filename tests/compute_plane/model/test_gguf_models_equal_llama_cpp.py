"""Tiny models in GGUF files: logits are llama.cpp's, which reads the same files.

What transformers computes says nothing of how files name things and lay rows: that is llama.cpp's
doing. Runs where its program `llama-debug` is found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from compute_plane.model.loader import load_model
from compute_plane.model.rope_scaling import yarn_attention_factor
from tests.compute_plane.model.falcon_models import FalconModel
from tests.compute_plane.model.gemma4_models import Gemma4Model
from tests.compute_plane.model.granite4_models import Granite4Model
from tests.compute_plane.model.latent_models import LatentModel
from tests.compute_plane.model.lfm2_models import Lfm2Model
from tests.compute_plane.model.llama_cpp import NEEDS_PROGRAM, run
from tests.compute_plane.model.nemotron_models import NemotronModel
from tests.devices import Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

PROMPT = "hello hello ab cd hell x hello, hello"
MULTIPLIERS = {
    "embedding_scale": 3.0,
    "residual_scale": 0.22,
    "attention.scale": 0.4,
    "logit_scale": 1.5,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
ERNIE = {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 192}
HALF = {"rotary_dim": 8}
DENSE_FIRST = {"num_layers": 3, "dense_layers": 1}
DIVISORS = [1.0, 1.1, 1.3, 2.0, 3.0, 5.0]
OF_31B = {"global_kv_heads": 1, "keys_are_values": True}
GEMMA4_DIVISORS = Gemma4Model().divisors_in_gguf()
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}, {}),
    "llama 3": ({}, {}, {"rope_freqs.weight": [1.0, 1.0, 1.5, 2.0, 3.0, 8.0, 8.0, 8.0]}),
    "llama, linear": ({}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5}, {}),
    "llama, yarn": ({}, YARN, {}),
    "mixtral": ({"architecture": "mixtral"}, {}, {}),
    "ministral": ({"architecture": "ministral3"}, {}, {}),
    "qwen2": ({"architecture": "qwen2"}, {}, {}),
    "qwen2, yarn": ({"architecture": "qwen2"}, YARN, {}),
    "qwen2 moe": ({"architecture": "qwen2_moe"}, {"expert_shared_feed_forward_length": 48}, {}),
    "qwen3": ({"architecture": "qwen3"}, {}, {}),
    "qwen3 moe": ({"architecture": "qwen3_moe"}, {}, {}),
    "phi3": ({"architecture": "phi3"}, {}, {}),
    "phi3, longrope": (
        {"architecture": "phi3", "rotary_dim": 12},
        {
            "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": 1.25,
            "attention.sliding_window": 0,
        },
        {"rope_factors_short.weight": DIVISORS, "rope_factors_long.weight": [64.0] * 6},
    ),
    "glm4": ({"architecture": "glm4", **HALF}, {}, {}),
    "glm 4.5": ({"architecture": "glm4_moe", **HALF, **DENSE_FIRST}, {}, {}),
    "glm 4.5 air": (
        {"architecture": "glm4_moe", "has_extras": False, **HALF, **DENSE_FIRST}, {}, {},
    ),
    "ernie": ({"architecture": "ernie4_5"}, {}, {}),
    "ernie moe": ({"architecture": "ernie4_5_moe", **DENSE_FIRST}, ERNIE, {}),
    "dots": ({"architecture": "dots1", "num_kv_heads": 4, **DENSE_FIRST}, {}, {}),
    "seed": ({"architecture": "seed_oss"}, {}, {}),
    "exaone": ({"architecture": "exaone4"}, {}, {}),
    "exaone, windows": (
        {"architecture": "exaone4", "num_layers": 64},
        {"attention.sliding_window": 6, "attention.sliding_window_pattern": 4},
        {},
    ),
    "exaone moe": (
        {"architecture": "exaone_moe", "num_layers": 5, "dense_layers": 1},
        {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": 4,
            "expert_shared_feed_forward_length": 192,
        },
        {},
    ),
    "solar": ({"architecture": "solar_open", "has_extras": False}, {}, {}),
    "olmoe": ({"architecture": "olmoe", "num_kv_heads": 4}, {}, {}),
    "minimax": ({"architecture": "minimax_m2", **HALF}, {"expert_gating_func": 2}, {}),
    "smollm3": ({"architecture": "smollm3", "num_layers": 5}, {}, {}),
    "granite": ({"architecture": "granite"}, MULTIPLIERS, {}),
    "granite moe": ({"architecture": "granitemoe"}, MULTIPLIERS, {}),
    "gemma2": ({"architecture": "gemma2", "tied": True}, {"attention.sliding_window": 6}, {}),
    "gemma2, other caps": (
        {"architecture": "gemma2", "num_layers": 3, "tied": True},
        {
            "attention.sliding_window": 6, "attn_logit_softcapping": 0.8,
            "final_logit_softcapping": 3.0,
        },
        {},
    ),
    "gemma3": ({"architecture": "gemma3"}, {}, {}),
    "gemma3, windows": (
        {"architecture": "gemma3", "num_layers": 7},
        {
            "attention.sliding_window": 6,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        {},
    ),
    "gpt-oss": (
        {"architecture": "gpt_oss", "num_layers": 3}, {"attention.sliding_window": 6}, {},
    ),
    "olmo2": ({"architecture": "olmo2"}, {}, {}),
    "olmo3": (
        {"architecture": "olmo2", "num_layers": 5},
        {
            "attention.sliding_window": 6, **YARN,
            "rope.scaling.yarn_attn_factor": yarn_attention_factor(YARN["rope.scaling.factor"]),
        },
        {},
    ),
    "granite, windows": (
        {"architecture": "granite_swa", "num_layers": 3},
        MULTIPLIERS
        | {
            "attention.sliding_window": 6,
            "attention.sliding_window_pattern": [False, True, True],
            "attention.rope_pattern": [False, True, True],
        },
        {},
    ),
    "lfm2": ({"of": Lfm2Model}, {}, {}),
    "lfm2 moe": ({"of": Lfm2Model, "architecture": "lfm2_moe"}, {}, {}),
    "nemotron": ({"of": NemotronModel, "pattern": "M-MM*-", "mamba_head_dim": 80}, {}, {}),
    "nemotron, experts": ({"of": NemotronModel, "pattern": "ME*EM"}, {}, {}),
    "falcon": ({"of": FalconModel}, {}, {}),
    "falcon, norm behind the state": ({"of": FalconModel, "has_norm": True}, {}, {}),
    "granite 4": ({"of": Granite4Model}, {}, {}),
    "granite 4, experts": ({"of": Granite4Model, "num_experts": 6}, {}, {}),
    "deepseek v3": ({"of": LatentModel}, {}, {}),
    "deepseek v3, yarn": (
        {"of": LatentModel, "groups": (1, 1)},
        {**YARN, "rope.scaling.yarn_log_multiplier": 0.07},
        {},
    ),
    "deepseek v3, an older file": ({"of": LatentModel, "is_older": True}, {}, {}),
    "deepseek v2 lite": (
        {
            "of": LatentModel, "architecture": "deepseek_v2", "num_layers": 27, "query_rank": 0,
            "groups": (1, 1),
        },
        {},
        {},
    ),
    "youtu": ({"of": LatentModel, "architecture": "youtu"}, {}, {}),
    "gemma4": ({"of": Gemma4Model, **OF_31B, "cap": 3.0}, {}, GEMMA4_DIVISORS),
    "gemma4, shared": (
        {
            "of": Gemma4Model, "pattern": "SFSFSSF", "num_kv_heads": 1, "num_sharing": 3,
            "is_double": True, "input_size": 16, "cap": 30.0,
        },
        {},
        GEMMA4_DIVISORS,
    ),
    "gemma4, experts": (
        {"of": Gemma4Model, **OF_31B, "has_experts": True, "cap": 30.0}, {}, GEMMA4_DIVISORS,
    ),
    "gemma4, experts apart": (
        {
            "of": Gemma4Model, "pattern": "SF", "has_experts": True, "is_fused": False, "cap": 30.0,
        },
        {},
        GEMMA4_DIVISORS,
    ),
}  # fmt: skip
"""What a model has (`of`: the class that makes it), its file's keys, and vectors besides.

Each Gemma 4 has a cap: where its file names none llama.cpp takes 30, transformers none.
"""
COARSE = tuple(name for name in CASES if name.startswith("gemma"))
"""llama.cpp looks GELU up by float16."""

pytestmark = [pytest.mark.slow, NEEDS_PROGRAM]


@pytest.mark.parametrize("name", CASES)
def test_logits_behind_a_prompt_are_those_of_llama_cpp(tiny, tmp_path: Path, name: str) -> None:
    shape, keys, vectors = CASES[name]
    own = {key: value for key, value in shape.items() if key != "of"}
    made = shape.get("of", tiny.model)(**{"tied": False, **own})
    for weight, values in made.weights.items():
        if values.ndim > 1 and "embed" not in weight:
            values *= np.float32(0.15)

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            full = f"{made.in_gguf}.{key}"
            writer.kv_data[0].pop(full, None)
            if isinstance(value, list):
                writer.add_array(full, value)
            elif isinstance(value, str):
                writer.add_string(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            else:
                writer.add_float32(full, value)

    path = tiny.gguf(tmp_path / "model.gguf", made, change=change, vectors=vectors)
    expected, tokens = run(path, PROMPT, tmp_path)
    model = load_model(str(path))
    with Target("cpu", "cpu").running(
        model, num_blocks=8, block_size=16, keep_logits=True
    ) as executor:
        driver = BatchDriver(executor, num_blocks=8, block_size=16)
        output = executor.execute(driver.batch([DrivenSequence(tokens)]))
    assert output.logits is not None
    (found,) = output.logits
    assert len(tokens) > 12
    tolerance = 2e-3 if name in COARSE else 5e-5
    np.testing.assert_allclose(found, expected[-len(found) :], atol=tolerance, rtol=tolerance)
