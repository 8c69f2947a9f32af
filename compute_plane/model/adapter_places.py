"""Where in a model what an adapter's file holds belongs, and in which order its rows are there.

    W [N, K], file's rows  →  parts of fused matrices  →  order of rows in heads  →  factors
    up [N, r]                 the same rows               the same order             the same ones

What is done to rows of W on the way from a file to a kernel is done to those of `up`, for
W + up · down is a matrix of that file, too. It depends on the kind of file that the adapter is, not
on that of the model: the rows of a directory are those of PEFT's adapters, those of a GGUF file
those of its converter, which makes both. `down`, of all parts the same one, is never touched:
columns are in the model's order in all files of whole floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from compute_plane.model import layout
from compute_plane.model.adapter import ROLES, LowRankPair
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gguf import GgufSource
from compute_plane.model.layout_parts import Part, parts_of_files
from compute_plane.model.loader import LoadedModel
from compute_plane.model.stored_names import directory_name, gguf_name
from compute_plane.model.tensor import Float32Array, RawTensor
from compute_plane.model.tensor_parts import RowsOfPart

MAX_RANK: Final = 1024
MULTIPLIED_IN_GGUF: Final = ("falcon-h1",)
"""Architectures whose multipliers GGUF files have in their matrices, directories beside them."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredPair:
    """Two tensors of an adapter's file. `matrix`: what they change, by the name in such files.

    `down`: [r, K], `up`: [N, r], as they are stored; `scale`: of their product.
    """

    matrix: str
    down: RawTensor
    up: RawTensor
    scale: float


class AdapterPlaces:
    """Where adapters in files of a kind belong in a model.

    `path`: of the weights, for errors. Raises UnsupportedModelError for a model that takes none.
    """

    def __init__(self, path: Path, model: LoadedModel, *, in_gguf: bool) -> None:
        spec = model.spec
        title = ARCHITECTURES[spec.architecture].title
        if spec.latents is not None:
            raise UnsupportedModelError(
                path, f"a {title} model takes no adapters: it has latents in place of keys"
            )
        is_other_kind = in_gguf != isinstance(model.source, GgufSource)
        if is_other_kind and spec.architecture in MULTIPLIED_IN_GGUF:
            raise UnsupportedModelError(
                path,
                f"an adapter of {title} must be of the model's kind of files: multipliers are in "
                "the matrices of GGUF files, and beside those of directories",
            )
        self._path = path
        self._model = model
        turning = ARCHITECTURES[spec.architecture].turns_neighbours
        turns_neighbours = turning != "never" if in_gguf else turning == "always"
        self._head_orders = layout.head_orders(spec, turns_neighbours=turns_neighbours)
        self._shapes = layout.tensor_shapes(spec)
        self._parts = parts_of_files(spec, in_gguf=in_gguf)
        self._owners: dict[str, list[str]] = {}
        to_name = (
            partial(gguf_name, architecture=spec.architecture)
            if in_gguf
            else partial(directory_name, spec)
        )
        for name in self._shapes:
            part = self._parts.get(name)
            stored = to_name(name if part is None else part.stored)
            self._owners.setdefault(stored, []).append(name)

    def pairs_of(self, stored: StoredPair) -> dict[str, LowRankPair]:
        """Return what two tensors of the file are of the model, by the names of what they change.

        Several where the file's matrix is several of the model's. Raises ModelFileError.
        """
        owners = self._owners.get(stored.matrix)
        shown = printable(stored.up.stored_name)
        if owners is None:
            raise ModelFileError(
                self._path,
                f"tensor {shown} is of {printable(stored.matrix)}, which the model, of "
                f"{self._model.spec.num_layers} layers, does not have",
            )
        if not all(name.endswith(tuple(f".{role}.weight" for role in ROLES)) for name in owners):
            raise UnsupportedModelError(
                self._path,
                f"tensor {shown} is of {printable(stored.matrix)}, which no adapter may change; "
                f"what may be is {', '.join(role.rpartition('.')[2] for role in ROLES)}",
            )
        self._check_shapes(stored, self._stored_shape(owners[0]))
        down = stored.down.to_float32()
        with np.errstate(over="ignore", invalid="ignore"):
            up = stored.up.to_float32() * np.float32(stored.scale)
            pairs = {name: LowRankPair(down, self._rows(name, up)) for name in owners}
        if not all(np.isfinite(pair.up).all() for pair in pairs.values()):
            raise ModelFileError(self._path, f"tensor {shown} holds too large weights")
        return pairs

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the file's matrix that a tensor of the model lies in."""
        part = self._parts.get(name)
        return self._shapes[name] if part is None else part.shape

    def _check_shapes(self, stored: StoredPair, shape: tuple[int, ...]) -> None:
        """Check both tensors of a pair. `shape`: of the matrix that they change."""
        rank = stored.down.shape[0]
        for tensor, expected in (
            (stored.down, (rank, shape[1])),
            (stored.up, (shape[0], rank)),
        ):
            if tensor.shape != expected:
                raise ModelFileError(
                    self._path,
                    f"tensor {printable(tensor.stored_name)} must have shape {list(expected)}, "
                    f"got {list(tensor.shape)}",
                )
        if rank > MAX_RANK:
            raise ModelFileError(
                self._path,
                f"tensor {printable(stored.down.stored_name)}: the rank must be at most "
                f"{MAX_RANK}, got {rank}",
            )

    def _rows(self, name: str, up: Float32Array) -> Float32Array:
        """Return the rows of a matrix of the file that are those of the model's tensor."""
        part: Part | None = self._parts.get(name)
        order = self._head_orders.get(name)
        of_model = self._model.source.tensor(name)
        if of_model.input_order is not None:
            raise UnsupportedModelError(
                of_model.path,
                f"tensor {printable(of_model.stored_name)} takes no adapters: the groups of its "
                "scales are strewn over its columns",
            )
        if part is not None:
            assert isinstance(part, RowsOfPart)  # turned heads are those of latents
            up = up[np.concatenate([runs.numbers() for runs in part.runs])]
        if order is not None:
            up = up.reshape(-1, len(order), up.shape[1])[:, order].reshape(up.shape)
        return np.ascontiguousarray(up * of_model.factors())


def paired(
    path: Path, halves: Mapping[str, Mapping[str, RawTensor]], names: tuple[str, str]
) -> Iterator[tuple[str, RawTensor, RawTensor]]:
    """Yield what is changed, and `down` and `up`. Raises ModelFileError where one is missing.

    `halves`: by what is changed; the two by their `names`.
    """
    for changed, found in halves.items():
        for name in names:
            if name not in found:
                other = next(iter(found.values()))
                raise ModelFileError(
                    path, f"tensor {printable(other.stored_name)} is there without its {name}"
                )
        yield changed, found[names[0]], found[names[1]]
