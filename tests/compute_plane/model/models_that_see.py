"""Tiny models of transformers' with a vision tower, as directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.compute_plane.model.recorded_models import PROMPTS


def write_model_that_sees(
    tiny: Any, folder: Path, make: Callable[[int], Any]
) -> tuple[Path, list[np.ndarray]]:
    """Write a directory as transformers does; return it, and its logits behind two texts.

    `make`: makes the model for a vocabulary of so many tokens.
    """
    import torch

    text = tiny.directory(folder / "text", tiny.model(architecture="qwen2"))
    vocab_size = json.loads((text / "config.json").read_text())["vocab_size"]
    torch.manual_seed(5)
    model = make(vocab_size).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(std=0.2 if weights.dim() > 1 and "embed" not in name else 1.0)
    model.save_pretrained(folder / "hf")
    shutil.copy(text / "tokenizer.json", folder / "hf")
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0, -1].numpy() for prompt in PROMPTS]
    return folder / "hf", logits
