"""Adapters in GGUF files.

    general.type            adapter
    general.architecture    the model's
    adapter.type            lora
    adapter.lora.alpha      α: the product is multiplied by α / r; as in llama.cpp 0 is 1
    blk.N.attn_q.weight.lora_a    [r, K]
    blk.N.attn_q.weight.lora_b    [N, r], its rows in the order of GGUF files

Source: convert_lora_to_gguf and llama-adapter of the llama.cpp project.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np

from compute_plane.model.adapter_places import StoredPair, paired
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gguf_header import GgufFile, open_gguf
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.gguf_parts import COUNT
from compute_plane.model.spec import ModelSpec
from compute_plane.model.stored_tensor import FLOATS
from compute_plane.model.tensor import RawTensor

KIND: Final = "general.type"
ARCHITECTURE: Final = "general.architecture"
TYPE: Final = "adapter.type"
ALPHA: Final = "adapter.lora.alpha"
INVOCATION: Final = "adapter.alora.invocation_tokens"
DOWN: Final = "lora_a"
UP: Final = "lora_b"
_NAME: Final = re.compile(rf"(?P<matrix>.+\.weight)\.(?P<half>{DOWN}|{UP})")


def read_gguf_adapter(path: Path, spec: ModelSpec) -> list[StoredPair]:
    """Return what an adapter's file holds, nothing of it decoded. `spec`: of its model.

    Raises ModelFileError, UnsupportedModelError.
    """
    file = open_gguf(path)
    keys = GgufMetadata(file)
    expected = ((KIND, "adapter"), (TYPE, "lora"), (ARCHITECTURE, spec.architecture))
    for key, value in expected:
        given = keys.text(key)
        if given != value:
            shown = "nothing" if given is None else printable(given)
            what = " as of the model" if key == ARCHITECTURE else ""
            raise UnsupportedModelError(path, f"{key} must be {value}{what}, got {shown}")
    if keys.has(INVOCATION):
        raise UnsupportedModelError(path, f"{INVOCATION} is not supported")
    if keys.integer(COUNT) not in (None, 1):
        raise UnsupportedModelError(path, "an adapter in several files is not supported")
    alpha = keys.number(ALPHA) or 0.0
    halves: dict[str, dict[str, RawTensor]] = {}
    for name in file.tensors:
        found = _NAME.fullmatch(name)
        if found is None:
            raise UnsupportedModelError(
                path, f"tensor {printable(name)} is neither a {DOWN} nor a {UP} of a matrix"
            )
        halves.setdefault(found["matrix"], {})[found["half"]] = _tensor(file, name)
    return [
        StoredPair(matrix, down, up, alpha / down.shape[0] if alpha else 1.0)
        for matrix, down, up in paired(path, halves, (DOWN, UP))
    ]


def _tensor(file: GgufFile, name: str) -> RawTensor:
    entry = file.tensors[name]
    if entry.format not in FLOATS.values():
        raise UnsupportedModelError(
            file.path,
            f"tensor {printable(name)} has type {entry.format.label}; "
            f"supported are {', '.join(FLOATS)}",
        )
    if len(entry.shape) != 2:
        raise ModelFileError(
            file.path, f"tensor {printable(name)} must be a matrix, got {list(entry.shape)}"
        )
    flat = np.frombuffer(entry.buffer, np.uint8, entry.num_bytes, entry.offset)
    rows = flat.reshape(-1, entry.format.row_bytes(entry.shape[-1]))
    return RawTensor(name, name, entry.path, entry.format, entry.shape, rows)
