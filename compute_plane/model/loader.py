"""From a model reference to a model: one entry for everything that needs one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from compute_plane.model.assets import ModelAssets
from compute_plane.model.errors import ModelFileError, printable, system_fault
from compute_plane.model.gguf import GgufSource, read_gguf_spec
from compute_plane.model.gguf_parts import open_parts
from compute_plane.model.gguf_tokenizer import read_gguf_assets
from compute_plane.model.group_config import read_quantization
from compute_plane.model.hf_assets import read_hf_assets
from compute_plane.model.hf_config import read_hf_spec
from compute_plane.model.hf_text_part import text_part
from compute_plane.model.json_file import JsonObject
from compute_plane.model.pooling import directory_pooling
from compute_plane.model.safetensors import open_safetensors
from compute_plane.model.source import ModelLocation, locate_model
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorSource

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose files are open and checked; its weights still lie in them.

    `sha256`: hex digest of the file where it was checked (the embedded model), None elsewhere.
    """

    spec: ModelSpec
    assets: ModelAssets
    source: TensorSource
    path: Path
    sha256: str | None


def load_model(
    reference: str,
    locate: Callable[[str], ModelLocation] = locate_model,
    *,
    long_context: bool = False,
) -> LoadedModel:
    """Find a model, check its files and read everything but the weights.

    `long_context`: one with LongRoPE is made for long contexts. Raises ModelReferenceError if the
    reference leads nowhere, ModelFileError if a file is at fault, UnsupportedModelError if the
    model is of another kind; each with a message of one line.
    """
    location = locate(reference)
    if location.path.is_dir():
        return _load_directory(location, long_context=long_context)
    return _load_gguf(location, long_context=long_context)


def _load_gguf(location: ModelLocation, *, long_context: bool) -> LoadedModel:
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        # The digest takes as long as all the rest, and hashing lets go of the interpreter lock.
        digest = pool.submit(_check_digest, location)
        file = open_parts(location.path)
        spec = read_gguf_spec(file, location.name, long_context=long_context)
        assets = read_gguf_assets(file, spec)
        digest.result()
    return LoadedModel(spec, assets, GgufSource(file, spec), location.path, location.sha256)


def _load_directory(location: ModelLocation, *, long_context: bool) -> LoadedModel:
    if not _has_config(location.path):
        raise ModelFileError(location.path, f"no Hugging Face directory: it has no {CONFIG}")
    config = JsonObject.read(location.path / CONFIG)
    of_text = text_part(config)
    config = config if of_text is None else of_text
    name = location.name or printable(location.path.resolve().name)
    spec = read_hf_spec(config, name, long_context=long_context)
    spec = replace(spec, pooling=directory_pooling(location.path))
    quantization = read_quantization(config)
    spec, source = open_safetensors(
        location.path, spec, quantization, is_text_part=of_text is not None
    )
    assets = read_hf_assets(location.path, config, spec)
    return LoadedModel(spec, assets, source, location.path, None)


def _has_config(directory: Path) -> bool:
    """Tell whether the file is there, be it one that cannot be read or a link to nothing."""
    try:
        (directory / CONFIG).lstat()
    except FileNotFoundError:
        return False
    except OSError:  # reading it says why
        return True
    return True


def _check_digest(location: ModelLocation) -> None:
    if location.sha256 is None:
        return
    try:
        with location.path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFileError(location.path, system_fault(error)) from None
    if actual != location.sha256:
        raise ModelFileError(
            location.path, f"SHA-256 must be {location.sha256}, the file has {actual}"
        )
