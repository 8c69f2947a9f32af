"""Adapters as they lie in files: directories of PEFT, and GGUF files as llama.cpp converts them."""

from __future__ import annotations

import hashlib
import stat
from typing import TYPE_CHECKING

from compute_plane.model.adapter import Adapter
from compute_plane.model.adapter_places import AdapterPlaces
from compute_plane.model.errors import (
    ModelFileError,
    ModelReferenceError,
    printable,
    system_fault,
)
from compute_plane.model.gguf_adapter import read_gguf_adapter
from compute_plane.model.peft_adapter import CONFIG, WEIGHTS, read_peft_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from compute_plane.model.adapter import LowRankPair
    from compute_plane.model.loader import LoadedModel


def load_adapter(name: str, path: Path, model: LoadedModel) -> Adapter:
    """Read an adapter of a model, all of it or nothing. `path`: a PEFT directory or a GGUF file.

    Raises ModelReferenceError if nothing is there, ModelFileError if a file is at fault or does not
    go with the model, UnsupportedModelError for what is no plain LoRA of the matrices that adapters
    may change (`compute_plane.model.adapter.ROLES`). Their field is lora; the message, one line,
    begins with that and the adapter's name.
    """
    try:
        return _load(name, path, model)
    except (ModelReferenceError, ModelFileError) as error:
        error.message = f"lora: {name}: {error.message}"
        error.args = (error.message,)
        error.field = "lora"
        raise


def _load(name: str, path: Path, model: LoadedModel) -> Adapter:
    in_gguf = _is_gguf(path)
    weights = path if in_gguf else path / WEIGHTS
    read = read_gguf_adapter if in_gguf else read_peft_adapter
    stored_pairs = read(path, model.spec)
    if not stored_pairs:
        raise ModelFileError(weights, "it has no tensors, so it is no adapter")
    places = AdapterPlaces(weights, model, in_gguf=in_gguf)
    pairs: dict[str, LowRankPair] = {}
    for stored in stored_pairs:
        found = places.pairs_of(stored)
        if not pairs.keys().isdisjoint(found):
            shown = printable(stored.up.stored_name)
            raise ModelFileError(weights, f"tensor {shown} changes what another one does, too")
        pairs |= found
    files = [weights] if in_gguf else [path / CONFIG, weights]
    return Adapter(name, pairs, _sha256(files))


def _is_gguf(path: Path) -> bool:
    """Tell whether an adapter is a GGUF file; else it is a directory."""
    shown = printable(str(path), limit=4096)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        fault = system_fault(error) if isinstance(error, OSError) else str(error)
        raise ModelReferenceError(f"{shown}: {fault}") from None
    is_directory = stat.S_ISDIR(mode)
    if not is_directory and path.suffix != ".gguf":
        raise ModelReferenceError(
            f"{shown}: neither a .gguf file nor a directory of PEFT "
            f"(adapter_config.json and {WEIGHTS})"
        )
    return not is_directory


def _sha256(files: Sequence[Path]) -> str:
    """Return the digest of the one file; of several, of their digests, one behind the other."""
    digests = []
    for path in files:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256"))
        except OSError as error:
            raise ModelFileError(path, system_fault(error)) from None
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(each.digest() for each in digests)).hexdigest()
