"""Which tensors of a group-wise quantised checkpoint make up a matrix, checked and put together.

A word holds p = 32 / bits integers. Where a plain checkpoint has `<module>.weight`, [N outputs, K
inputs], these have, with G groups of inputs,

    gptq                                                              packed along
      qweight            int32 [K / p, N]                             K
      qzeros             int32 [G, N / p]   z (gptq_v2), z − 1        N
      scales             [G, N]
      g_idx              int32 [K]          each input's group; may be missing, or all 0
    awq
      qweight            int32 [K, N / 8]                             N, the outputs of a word in
      qzeros             int32 [G, N / 8]   z                         N  the order 0 2 4 6 1 3 5 7
      scales             [G, N]
    compressed-tensors
      weight_packed      int32 [N, K / p]                             K
      weight_zero_point  int32 [N / p, G]   z, unless symmetric       N
      weight_scale       [N, G]
      weight_g_idx       int32 [K]          may be missing, or all −1
      weight_shape       int64 [2]          N, K

A symmetric checkpoint need not have qzeros. Groups follow each other along K, but where a g_idx
says otherwise: GPTQ in activation order quantises inputs by their size, and strews a group over K.
Such columns are sorted by group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.group_blocks import BLOCK
from compute_plane.model.group_config import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GroupQuantization,
    ZeroPoints,
)
from compute_plane.model.group_matrices import (
    GroupMatrix,
    PackedAcrossRows,
    PackedInRows,
    Words,
)
from compute_plane.model.stored_tensor import FLOATS, StoredTensor
from compute_plane.model.tensor import IntArray, RawTensor

AWQ_PLACES: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of the eight outputs of a word lies at each place."""


@dataclass(frozen=True, slots=True)
class PartNames:
    """What the parts are called, behind the module's name and a dot."""

    quants: str
    zeros: str
    scales: str
    groups: str
    shape: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        names = self.quants, self.zeros, self.scales, self.groups, self.shape
        return tuple(name for name in names if name is not None)


_TRANSPOSED: Final = PartNames("qweight", "qzeros", "scales", "g_idx")
PART_NAMES: Final[Mapping[str, PartNames]] = {
    GPTQ: _TRANSPOSED,
    AWQ: _TRANSPOSED,
    COMPRESSED_TENSORS: PartNames(
        "weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape"
    ),
}


def take_group_matrices(
    tensors: dict[str, StoredTensor],
    quantization: GroupQuantization,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, RawTensor]:
    """Take the parts of quantised matrices out of a checkpoint's tensors; return the matrices.

    By canonical name. `shapes`: of what the model has, by the same: a matrix is made of nothing
    else. Old tools wrote a bias of zeros beside each: where the model has none, it is taken out
    too. Raises ModelFileError naming the tensor at fault.
    """
    names = PART_NAMES[quantization.method]
    parts_of: dict[str, dict[str, StoredTensor]] = {}
    for name in list(tensors):
        module, _, part = name.rpartition(".")
        if part in names.all:
            parts_of.setdefault(module, {})[part] = tensors.pop(name)
    matrices = {}
    for module, parts in parts_of.items():
        canonical, part = f"{module}.weight", next(iter(parts))
        path, shown = parts[part].path, f"tensor {printable(parts[part].name)}"
        if canonical == layout.EMBEDDING:
            raise UnsupportedModelError(path, f"{shown}: an embedding is not read so")
        if len(shapes.get(canonical, ())) != 2:
            raise ModelFileError(path, f"{shown} is of no matrix that the model has")
        if canonical in tensors:
            raise ModelFileError(path, f"{shown} is beside a plain weight")
        matrix = _Parts(parts, quantization, shapes[canonical]).matrix()
        bias_name = f"{module}.{layout.BIAS}"
        bias = None if bias_name in shapes else tensors.get(bias_name)
        if bias is not None and bias.dtype in FLOATS and not bias.array().any():
            del tensors[bias_name]
        matrices[canonical] = RawTensor(
            name=canonical,
            stored_name=parts[names.scales].name,  # for errors: integers are never too large
            path=parts[names.quants].path,
            format=matrix.format,
            shape=shapes[canonical],
            stored=matrix,
            input_order=matrix.input_order,
            scale_group=matrix.scale_group,
        )
    return matrices


class _Parts:
    """The parts of one module's matrix of a known shape; each is checked when it is taken."""

    def __init__(
        self,
        parts: Mapping[str, StoredTensor],
        quantization: GroupQuantization,
        shape: tuple[int, ...],
    ) -> None:
        self._parts = parts
        self._names = PART_NAMES[quantization.method]
        self._quantization = quantization
        self._shape = shape
        self._per_word = 32 // quantization.bits

    def matrix(self) -> GroupMatrix:
        """Return the matrix. Raises ModelFileError."""
        if self._quantization.method == COMPRESSED_TENSORS:
            return self._by_rows()
        return self._transposed()

    def _transposed(self) -> GroupMatrix:
        """Put together what GPTQ and AWQ store, inputs before outputs."""
        names, bits = self._names, self._quantization.bits
        words = self._words(names.quants)
        is_awq = self._quantization.method == AWQ
        num_inputs, num_outputs = words.shape
        if is_awq:
            num_outputs *= self._per_word
            quants: PackedInRows | PackedAcrossRows = PackedAcrossRows(words.T, bits, AWQ_PLACES)
        else:
            num_inputs *= self._per_word
            quants = PackedInRows(words.T, bits)
        self._check_shape(names.quants, num_outputs, num_inputs)
        num_groups = self._num_groups(names.quants, num_inputs)
        zeros = None
        if names.zeros in self._parts or not self._quantization.is_symmetric:
            places = AWQ_PLACES if is_awq else tuple(range(self._per_word))
            zeros = self._transposed_zeros(num_groups, num_outputs, places)
        group_of_block, input_order = self._groups(num_inputs, num_groups)
        return GroupMatrix(
            self._quantization,
            quants,
            zeros,
            self._scales((num_groups, num_outputs)).array().T,
            group_of_block,
            input_order,
            self._parts[names.quants].path,
            self._name(names.zeros),
        )

    def _transposed_zeros(
        self, num_groups: int, num_outputs: int, places: tuple[int, ...]
    ) -> PackedAcrossRows:
        names, bits = self._names, self._quantization.bits
        if num_outputs % self._per_word:
            raise self._fault(names.quants, f"has {num_outputs} outputs, not whole words of zeros")
        words = self._words(names.zeros, (num_groups, num_outputs // self._per_word))
        # What one was taken from at once gets it back so, and what was borrowed goes back with it.
        borrows = self._quantization.zeros is ZeroPoints.WORDS_LESS_ONE
        added = sum(1 << bits * place for place in range(self._per_word)) if borrows else 0
        return PackedAcrossRows(words.T, bits, places, added)

    def _by_rows(self) -> GroupMatrix:
        """Put together what compressed-tensors stores, outputs before inputs."""
        names, bits = self._names, self._quantization.bits
        words = self._words(names.quants)
        num_outputs, num_inputs = len(words), words.shape[1] * self._per_word
        assert names.shape is not None
        shape = self._part(names.shape, ("I64", "I32"), (2,))
        if shape.array().tolist() != [num_outputs, num_inputs]:
            raise self._fault(
                names.shape,
                f"says {shape.array().tolist()}, {names.quants} is {[num_outputs, num_inputs]}",
            )
        self._check_shape(names.quants, num_outputs, num_inputs)
        num_groups = self._num_groups(names.quants, num_inputs)
        zeros = None
        if not self._quantization.is_symmetric:
            num_words = -(-num_outputs // self._per_word)
            zero_words = self._words(names.zeros, (num_words, num_groups))
            zeros = PackedAcrossRows(zero_words, bits, tuple(range(self._per_word)))
        elif names.zeros in self._parts:
            raise self._fault(names.zeros, "is there, but the checkpoint is symmetric")
        group_of_block, input_order = self._groups(num_inputs, num_groups)
        return GroupMatrix(
            self._quantization,
            PackedInRows(words, bits),
            zeros,
            self._scales((num_outputs, num_groups)).array(),
            group_of_block,
            input_order,
            self._parts[names.quants].path,
            self._name(names.zeros),
        )

    def _check_shape(self, part: str, num_outputs: int, num_inputs: int) -> None:
        if (num_outputs, num_inputs) != self._shape:
            found = [num_outputs, num_inputs]
            raise self._fault(
                part, f"is a matrix of shape {found}, the model needs {list(self._shape)}"
            )

    def _num_groups(self, part: str, num_inputs: int) -> int:
        if num_inputs % BLOCK:
            raise UnsupportedModelError(
                self._parts[part].path,
                f"tensor {self._name(part)} has {num_inputs} inputs; multiples of {BLOCK} are read",
            )
        size = self._quantization.group_size
        return 1 if size is None else -(-num_inputs // size)

    def _groups(self, num_inputs: int, num_groups: int) -> tuple[IntArray, IntArray | None]:
        """Return the group of each block of 32 columns, and in which order the columns are."""
        part = self._names.groups
        in_order = np.arange(num_inputs) // (self._quantization.group_size or num_inputs)
        if part not in self._parts and not self._quantization.needs_order:
            return in_order[::BLOCK], None
        stored = self._part(part, ("I32",), (num_inputs,)).array()
        unset = -1 if self._quantization.method == COMPRESSED_TENSORS else 0
        if (stored == unset).all() and not self._quantization.needs_order:
            return in_order[::BLOCK], None
        outside = stored[(stored < 0) | (stored >= num_groups)]
        if outside.size:
            raise self._fault(part, f"has group {outside[0]}, there are {num_groups}")
        sizes, wanted = (np.bincount(g, minlength=num_groups) for g in (stored, in_order))
        if (sizes != wanted).any():
            group = np.flatnonzero(sizes != wanted)[0]
            words = f"has {sizes[group]} inputs in group {group}, must have {wanted[group]}"
            raise self._fault(part, words)
        if _is_pure(stored):
            return stored[::BLOCK].astype(np.intp), None
        return in_order[::BLOCK], np.argsort(stored, kind="stable")

    def _words(self, part: str, shape: tuple[int, ...] | None = None) -> Words:
        words: Words = self._part(part, ("I32",), shape).array().view(np.uint32)
        return words

    def _scales(self, shape: tuple[int, ...]) -> StoredTensor:
        return self._part(self._names.scales, tuple(FLOATS), shape)

    def _part(
        self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None
    ) -> StoredTensor:
        """Return a part of one of some types and of a shape, if that is known: a matrix if not."""
        if part not in self._parts:
            path = next(iter(self._parts.values())).path
            raise ModelFileError(path, f"tensor {self._name(part)} is missing")
        stored = self._parts[part]
        if stored.dtype not in dtypes:
            raise self._fault(part, f"has type {stored.dtype}, must be {' or '.join(dtypes)}")
        if shape is None and len(stored.shape) != 2:
            raise self._fault(part, f"has shape {list(stored.shape)}, must be a matrix")
        if shape is not None and stored.shape != shape:
            raise self._fault(part, f"has shape {list(stored.shape)}, must be {list(shape)}")
        return stored

    def _name(self, part: str) -> str:
        """Return the name that the files have for a part, or would have."""
        prefix, _, _ = next(iter(self._parts.values())).name.rpartition(".")
        return printable(f"{prefix}.{part}")

    def _fault(self, part: str, words: str) -> ModelFileError:
        return ModelFileError(self._parts[part].path, f"tensor {self._name(part)} {words}")


def _is_pure(groups: IntArray) -> bool:
    """Tell whether each block of 32 is of one group."""
    blocks = groups.reshape(-1, BLOCK)
    return bool((blocks == blocks[:, :1]).all())
