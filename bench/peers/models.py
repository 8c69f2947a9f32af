"""The embedded model in the peers' formats, in the directory `models` beside their environments.

All of them come from the one GGUF file: `llama-quantize` makes its variants, transformers
dequantises it, and OpenVINO's exporter compresses that to its own formats. Models of other shapes
have random weights (`shapes`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers.environments import llama_cpp_builds, llama_cpp_directory, python_of
from bench.peers.processes import RUNNERS, peer_environment
from bench.peers.shapes import Shape
from compute_plane.model.source import DEFAULT, locate_model
from planes.errors import ConfigError

DEFAULT_MODEL = "q4_1.gguf"
"""The embedded model as it is: Q4_1, its embeddings Q8_0."""

QUANTISED: Mapping[str, Sequence[str]] = {
    "BF16.gguf": ("BF16",),
    "Q8_0.gguf": ("Q8_0",),
    "Q4_0.gguf": ("Q4_0",),
    "Q4_0pure.gguf": ("--pure", "Q4_0"),
}
"""Variants, and what `llama-quantize` is told: options before its files, then the type."""

HF_FLOAT32, HF_BFLOAT16 = "hf_f32", "hf_bf16"
OPENVINO_IRS = {"ov_f32": "f32", "ov_int8_sym": "int8_sym", "ov_int4_ch": "int4_ch"}
"""IRs, and their names in `runners/export_openvino.py`."""


def model_path(directory: Path, name: str) -> Path:
    """Return where a model is."""
    return directory.absolute() / "models" / name


def make(directory: Path, environments: Sequence[str]) -> None:
    """Make the models that are not there yet, as far as the environments that make them are.

    Raises EngineError.
    """
    embedded = model_path(directory, DEFAULT_MODEL)
    embedded.parent.mkdir(parents=True, exist_ok=True)
    if not embedded.exists():
        shutil.copyfile(locate_model(DEFAULT).path, embedded)
    if "llamacpp" in environments:
        for name, words in QUANTISED.items():
            _quantise(directory, embedded, model_path(directory, name), words)
    hf_float32 = model_path(directory, HF_FLOAT32)
    hf_bfloat16 = model_path(directory, HF_BFLOAT16)
    if "transformers" in environments and not (hf_float32.exists() and hf_bfloat16.exists()):
        _script(directory, "transformers", "export_hf.py", embedded, hf_float32, hf_bfloat16)
    if "ovexport" in environments:
        wanted = [
            f"{weights}={model_path(directory, name)}"
            for name, weights in OPENVINO_IRS.items()
            if not model_path(directory, name).exists()
        ]
        if wanted:
            if not hf_float32.exists():
                raise ConfigError(f"there is no {hf_float32}; the transformers peer makes it")
            _script(directory, "ovexport", "export_openvino.py", hf_float32, *wanted)


def make_shapes(directory: Path, shapes: Sequence[Shape]) -> None:
    """Make all formats of models with random weights that are not there yet. Raises EngineError."""
    embedded = model_path(directory, DEFAULT_MODEL)
    for shape in shapes:
        targets = {model_path(directory, shape.file_of(words)): words for words in shape.formats}
        if all(target.exists() for target in targets):
            continue
        source = model_path(directory, shape.source)
        wanted = {
            "architecture": shape.architecture,
            "keys": shape.all_keys(),
            "tensors": shape.tensors(),
        }
        python = python_of(directory, "llamacpp")
        if not python.exists():
            raise ConfigError(f"there is no {python}; the llamacpp peer makes it", field="shapes")
        _run(
            [str(python), str(RUNNERS / "make_shape.py"), str(embedded), str(source)],
            peer_environment(), json.dumps(wanted),
        )  # fmt: skip
        for target, words in targets.items():
            _quantise(directory, source, target, words)
        source.unlink()  # several gigabytes that nothing reads again


def _quantise(directory: Path, source: Path, target: Path, words: Sequence[str]) -> None:
    if target.exists():
        return
    *options, kind = words
    part = target.with_suffix(".part")
    program = llama_cpp_directory(directory) / "llama-quantize"
    _run(
        [str(program), "--allow-requantize", *options, str(source), str(part), kind],
        peer_environment(llama_cpp_builds(directory)),
    )
    part.rename(target)


def _script(directory: Path, environment: str, script: str, *arguments: object) -> None:
    _run(
        [str(python_of(directory, environment)), str(RUNNERS / script), *map(str, arguments)],
        peer_environment(),
    )


def _run(command: Sequence[str], environ: Mapping[str, str], given: str = "") -> None:
    done = subprocess.run(command, env=environ, input=given, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"status {done.returncode} of {' '.join(command)}", field="directory")
