"""What llama.cpp's program `llama-debug` makes of a model and a text, where it is on the path."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

PROGRAM = shutil.which("llama-debug")
TIMEOUT_S = 120.0
NEEDS_PROGRAM = pytest.mark.skipif(
    PROGRAM is None, reason="llama.cpp's program llama-debug is not on the path"
)


def run(model: Path, prompt: str, folder: Path) -> tuple[np.ndarray, list[int]]:
    """Return the logits behind the prompt's last token, float32, and the prompt's tokens.

    `folder`: for its files. All is computed in float32.
    """
    assert PROGRAM is not None
    options = ["--model", model, "--prompt", prompt, "--no-escape", "--save-logits"]
    exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ngl", "0", "-t", "1"]
    done = subprocess.run(
        [PROGRAM, *options, *exact, "--logits-output-dir", folder],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if "error" in line]
    stem = folder / f"llamacpp-{model.stem}"
    tokens = np.fromfile(f"{stem}-tokens.bin", np.int32).tolist()
    return np.fromfile(f"{stem}.bin", np.float32), tokens
