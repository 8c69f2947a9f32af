"""Tensors of Qwen3-Next and Qwen3.5, by the formulas of `kernels.reference`: others' logits.

No executor is asked: this is of files alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compute_plane.model.loader import load_model
from tests.compute_plane.model.delta_net_forward import Forward
from tests.compute_plane.model.delta_net_models import IN_GGUF, DeltaNetModel
from tests.compute_plane.model.llama_cpp import NEEDS_PROGRAM, run
from tests.compute_plane.model.models_that_see import write_model_that_sees
from tests.compute_plane.model.recorded_models import PROMPTS

KINDS = pytest.mark.parametrize("architecture", IN_GGUF)
HEADS = pytest.mark.parametrize("heads", [(2, 4), (2, 8), (2, 2), (4, 8)], ids=str)
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "max_position_embeddings": 512, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
ROPE = {
    "rope_type": "default", "rope_theta": 30000.0, "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1], "mrope_interleaved": True,
}  # fmt: skip
VISION = {
    "depth": 1, "num_heads": 2, "patch_size": 14, "hidden_size": 16, "intermediate_size": 16,
    "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip


def small(architecture: str, heads: tuple[int, int]) -> DeltaNetModel:
    """Return a model whose matrices are small enough for all of its layers to matter."""
    made = DeltaNetModel(
        architecture=architecture, num_key_heads=heads[0], num_value_heads=heads[1]
    )
    for name, values in made.weights.items():
        if values.ndim > 1 and "embed" not in name and "conv1d" not in name:
            values *= np.float32(0.15)
    return made


@HEADS
@KINDS
@pytest.mark.spread(3)
def test_logits_from_both_kinds_of_files_are_those_of_transformers(
    tiny, tmp_path: Path, architecture: str, heads: tuple[int, int]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    made = small(architecture, heads)
    folder = tiny.directory(tmp_path / "m", made)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPTS[0]])).logits[0].numpy()
    for path in (folder, tiny.gguf(tmp_path / "m.gguf", made)):
        found = Forward(load_model(str(path))).logits(PROMPTS[0])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def model_that_sees(kind: str, vocab_size: int) -> Any:
    """Return one of transformers', tiny."""
    import transformers

    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | {"vocab_size": vocab_size, "rope_parameters": ROPE},
        vision_config=VISION,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_that_sees_gives_the_logits_of_transformers(
    tiny, tmp_path: Path, kind: str
) -> None:
    """Its vision tower is not used, nor are layers that predict ahead, as published ones have."""
    folder, expected = write_model_that_sees(
        tiny, tmp_path, lambda size: model_that_sees(kind, size)
    )
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"bos_token_id": 1, "eos_token_id": 2, "mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.layers.0.mlp.up_proj.weight"] = np.ones((3, 3), np.float32)
    save_file(tensors, folder / "model.safetensors")
    model = load_model(str(folder))
    for prompt, logits in zip(PROMPTS, expected, strict=True):
        found = Forward(model).logits(prompt)[-1]
        np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@NEEDS_PROGRAM
@HEADS
@KINDS
def test_logits_behind_a_prompt_are_those_of_llama_cpp(
    tiny, tmp_path: Path, architecture: str, heads: tuple[int, int]
) -> None:
    path = tiny.gguf(tmp_path / "model.gguf", small(architecture, heads))
    expected, tokens = run(path, "hello hello ab cd hell x hello, hello", tmp_path)
    found = Forward(load_model(str(path))).logits(tokens)[-1]
    np.testing.assert_allclose(found, expected[-len(found) :], rtol=5e-5, atol=5e-5)
