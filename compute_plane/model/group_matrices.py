"""Matrices whose weights share scales among groups of inputs, made into rows when they are wanted.

weight[n, k] = s[n, g(k)] · (q[n, k] − z[n, g(k)]), with integers q and z packed into words of 32
bits, the first in the lowest bits. Which tensors of a checkpoint hold them, and along which axis
they are packed, `compute_plane.model.group_parts` knows; here they all are rows of outputs, views
of the mapped file, of which blocks of 32 inputs (`compute_plane.model.group_blocks`) are made a run
of rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.group_blocks import BLOCK, write_blocks
from compute_plane.model.group_config import GroupQuantization, ZeroPoints
from compute_plane.model.stored_tensor import ARRAY_TYPES
from compute_plane.model.tensor import Float32Array, IntArray, Rows, TensorFormat, UInt8Array

Words: TypeAlias = npt.NDArray[np.uint32]

CHUNK_WEIGHTS: Final = 1 << 18
"""Weights turned at a time: what lies between file and blocks stays in the caches."""
ROWS_TOGETHER: Final = 8
"""Rows that may share words; chunks are multiples of it."""

FORMATS: Final = {
    (4, True): TensorFormat.INT4,
    (4, False): TensorFormat.UINT4,
    (8, True): TensorFormat.INT8,
    (8, False): TensorFormat.UINT8,
}
"""By bits, and whether all zero points are in the middle."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedInRows:
    """Integers whose words are of one row: `words` [R, n · bits / 32]."""

    words: Words
    bits: int

    def rows(self, which: Rows) -> UInt8Array:
        """Return the integers of some rows, uint8 [R, n]."""
        packed = _turned(self.words[which]).view(np.uint8)
        if self.bits == 8:
            return packed
        out = np.empty((*packed.shape, 2), np.uint8)
        np.bitwise_and(packed, 15, out=out[..., 0])
        np.right_shift(packed, 4, out=out[..., 1])
        return out.reshape(len(packed), -1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedAcrossRows:
    """Integers whose words are of several rows: `words` [R · bits / 32, n].

    `places`: which of its rows each place of a word is of, the lowest bits first. `added`: to each
    word before it is unpacked, modulo 2^32.
    """

    words: Words
    bits: int
    places: tuple[int, ...]
    added: int = 0

    def rows(self, which: Rows) -> UInt8Array:
        """Return the integers of some rows, uint8 [R, n]."""
        per_word, highest = len(self.places), np.uint32(2**self.bits - 1)
        added = np.uint32(self.added)
        if not isinstance(which, slice):
            shifts = self.bits * np.argsort(self.places)[which % per_word].astype(np.uint32)
            words = _turned(self.words[which // per_word]) + added
            integers = words >> shifts[:, None] & highest
            return integers.astype(np.uint8)
        first, end = which.start // per_word, -(-which.stop // per_word)
        words = _turned(self.words[first:end]) + added
        out = np.empty((len(words), per_word, words.shape[1]), np.uint8)
        for place, row in enumerate(self.places):
            out[:, row] = words >> np.uint32(place * self.bits) & highest
        begin = which.start - first * per_word
        return out.reshape(-1, words.shape[1])[begin : begin + which.stop - which.start]


@dataclass(frozen=True, slots=True, eq=False)
class GroupMatrix:
    """A matrix [N, K] in G groups, which gives blocks; the `stored` of a `RawTensor`.

    `zeros`: [N, G]; None: all are 2^(bits - 1). `scales`: [N, G], as stored (`ARRAY_TYPES`).
    `group_of_block`: of each 32 columns, [K / 32]. `input_order`: as in `RawTensor`. `path`,
    `zeros_name`: file and tensor of the zero points, for errors.
    """

    quantization: GroupQuantization
    quants: PackedInRows | PackedAcrossRows
    zeros: PackedAcrossRows | None
    scales: npt.NDArray[Any]
    group_of_block: IntArray
    input_order: IntArray | None
    path: Path
    zeros_name: str

    @property
    def format(self) -> TensorFormat:
        """The format of the rows."""
        return FORMATS[self.quantization.bits, self.quantization.is_symmetric]

    @property
    def num_inputs(self) -> int:
        """Inputs K."""
        return BLOCK * len(self.group_of_block)

    @property
    def scale_group(self) -> int:
        """How many neighbouring columns are of one group wherever one looks, from column 0 on."""
        begins = np.flatnonzero(np.diff(self.group_of_block)) + 1
        return BLOCK * int(np.gcd.reduce([*begins, len(self.group_of_block)]))

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, bytes of a row]."""
        return len(self.scales), self.format.row_bytes(self.num_inputs)

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        """Return some rows, uint8 [R, bytes of a row]. Raises ModelFileError."""
        if not isinstance(which, slice):
            return self._blocks(which)
        first, end, _ = which.indices(len(self.scales))
        out = np.empty((end - first, self.shape[1]), np.uint8)
        step = ROWS_TOGETHER * max(1, CHUNK_WEIGHTS // (ROWS_TOGETHER * self.num_inputs))
        for begin in range(first, end, step):
            part = slice(begin, min(begin + step, end))
            out[part.start - first : part.stop - first] = self._blocks(part)
        return out

    def _blocks(self, which: Rows) -> UInt8Array:
        quants = self.quants.rows(which)
        if self.input_order is not None:
            quants = np.take(quants, self.input_order, axis=1)
        scales = self._scales(which)[:, self.group_of_block]
        zeros = self._zeros(which)
        if zeros is not None:
            zeros = zeros[:, self.group_of_block]
        return write_blocks(quants, scales, zeros, self.quantization.bits)

    def _scales(self, which: Rows) -> Float32Array:
        scales = self.scales[which]
        if scales.dtype == ARRAY_TYPES["BF16"]:
            return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return scales.astype(np.float32)

    def _zeros(self, which: Rows) -> UInt8Array | None:
        """Return the zero points of some rows, [R, G]; None if the format has none.

        Stored as one less, a zero point of 0 has become the highest number: some tools let it fill
        the places behind it in its word too, and readers have taken it for 2^bits, or for 0.
        """
        if self.zeros is None:
            return None
        zeros, highest = self.zeros.rows(which), 2**self.quantization.bits - 1
        if self.quantization.is_symmetric:
            self._check_middle(zeros, highest // 2 + 1)
            return None
        if self.quantization.zeros is not ZeroPoints.LESS_ONE:
            return zeros
        if (zeros == highest).any():
            raise UnsupportedModelError(
                self.path,
                f"tensor {printable(self.zeros_name)} has zero points stored as {highest}, which "
                f"tools do not agree on (those of GPTQModel are read, and checkpoint_format "
                f"gptq_v2)",
            )
        return zeros + np.uint8(1)

    def _check_middle(self, zeros: UInt8Array, middle: int) -> None:
        """Check the zero points of a symmetric checkpoint, as they are stored: all are one.

        Where they should be one less, tools have forgotten that: what is meant is certain here.
        """
        is_less_one = self.quantization.zeros is not ZeroPoints.AS_THEY_ARE
        allowed = (middle - 1, middle) if is_less_one else (middle,)
        low, high = int(zeros.min()), int(zeros.max())
        if low != high or low not in allowed:
            found = low if low == high else f"{low} to {high}"
            raise ModelFileError(
                self.path,
                f"tensor {printable(self.zeros_name)} has zero points stored as {found}; in a "
                f"symmetric checkpoint all are {' or all '.join(map(str, allowed))}",
            )


def _turned(words: Words) -> Words:
    """Return a contiguous copy, of rows that may be columns of the file.

    Those are copied as they lie first: a column at a time would touch every page of the matrix.
    """
    if words.strides[0] < words.strides[1]:
        words = np.ascontiguousarray(words.T).T
    return np.ascontiguousarray(words)
