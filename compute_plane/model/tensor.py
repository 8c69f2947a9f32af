"""Tensors as they lie in model files: raw bytes with a format, a shape and a row order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from compute_plane.model.dequantize import decode_rows
from compute_plane.model.errors import ModelFileError, printable

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
AnyArray = npt.NDArray[Any]
IntArray = npt.NDArray[np.intp]
Rows: TypeAlias = slice | IntArray
"""Which rows: a run of them, or their numbers."""

ALL_ROWS: Final = slice(None)


class TensorFormat(Enum):
    """How the elements of a row are stored: blocks of so many elements in so many bytes.

    The integer formats and FP8 are those in which quantised checkpoints are handed on, and Q4_Z and
    Q8_Z what some of them run as (`compute_plane.model.group_blocks`); Q4_F is what MXFP4 runs as
    (`compute_plane.model.mxfp4`); the others are files' own.
    """

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q8_0 = ("Q8_0", 32, 34)
    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)
    Q5_0 = ("Q5_0", 32, 22)
    Q5_1 = ("Q5_1", 32, 24)
    Q4_K = ("Q4_K", 256, 144)
    Q5_K = ("Q5_K", 256, 176)
    Q6_K = ("Q6_K", 256, 210)
    Q2_K = ("Q2_K", 256, 84)
    Q3_K = ("Q3_K", 256, 110)
    IQ4_NL = ("IQ4_NL", 32, 18)
    IQ4_XS = ("IQ4_XS", 256, 136)
    MXFP4 = ("MXFP4", 32, 17)
    INT4 = ("INT4", 32, 20)
    UINT4 = ("UINT4", 32, 22)
    INT8 = ("INT8", 32, 36)
    UINT8 = ("UINT8", 32, 38)
    FP8 = ("FP8", 32, 36)
    Q4_F = ("Q4_F", 32, 18)
    Q4_Z = ("Q4_Z", 32, 19)
    Q8_Z = ("Q8_Z", 32, 35)

    def __init__(self, label: str, block_elements: int, block_bytes: int) -> None:
        self.label = label
        self.block_elements = block_elements
        self.block_bytes = block_bytes

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row; `elements` must be a multiple of the block."""
        return elements // self.block_elements * self.block_bytes


class StoredRows(Protocol):
    """The raw bytes of a tensor, uint8 [rows, bytes of a row]: an array, or what can make one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, bytes of a row]."""
        ...

    def __getitem__(self, which: Rows, /) -> UInt8Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class RunOfRows:
    """Neighbouring rows of others, `first` to `first + count`; a `StoredRows`."""

    of: StoredRows
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, bytes of a row]."""
        return self.count, self.of.shape[1]

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        if isinstance(which, slice):
            first, last, step = which.indices(self.count)
            return self.of[self.first + first : self.first + last : step]
        return self.of[self.first + which]


@dataclass(frozen=True, slots=True, eq=False)
class PickedRows:
    """Some rows of others, by their numbers; a `StoredRows`."""

    of: StoredRows
    numbers: IntArray

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, bytes of a row]."""
        return len(self.numbers), self.of.shape[1]

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        return self.of[self.numbers[which]]


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """One tensor, still in its file's format and usually still in the mapped file.

    `name`: the canonical name (`compute_plane.model.layout`), `stored_name`: the file's own.
    `shape`: outermost dimension first, [rows, columns] or [columns].
    `stored`: uint8 [rows, bytes of a row], read-only, in the file's row order.
    `input_order`: None if the columns are in the model's order. Otherwise column j of the rows is
    the model's input_order[j]: the groups of such a matrix are strewn over its columns, and rows
    can be quantised only where those of a group are neighbours.
    `head_order`: None if the rows are in the model's order. Otherwise they, or the elements of a
    bias, belong to heads of D rows, and row r of a head of the model is the file's head_order[r]
    (`compute_plane.model.layout.head_orders`).
    `added`: what is added to each element: weights of some norms are stored as what they are more
    than 1. Vectors alone have it.
    `holds_logarithms`: each element is −e to the power of what is stored. Vectors alone have it.
    `factor`: what each element is multiplied by: a number, or of a matrix in the file's row order
    one for each row, float32 [rows].
    `scale_group`: how many neighbouring columns of the rows surely have the same scale and zero
    point, from column 0 on; a multiple of 32 that divides their number, 32 where nothing is known.
    """

    name: str
    stored_name: str
    path: Path
    format: TensorFormat
    shape: tuple[int, ...]
    stored: StoredRows
    head_order: IntArray | None = None
    input_order: IntArray | None = None
    scale_group: int = 32
    added: float = 0.0
    holds_logarithms: bool = False
    factor: float | Float32Array = 1.0

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_stored_otherwise(self) -> bool:
        """Whether elements are not what is stored, but follow from it."""
        return self.holds_logarithms or self.added != 0

    @property
    def is_multiplied(self) -> bool:
        """Whether elements are what is stored times something."""
        return isinstance(self.factor, np.ndarray) or self.factor != 1

    def factors(self, which: Rows = ALL_ROWS) -> Float32Array:
        """Return what rows are multiplied by, one number or one for each, float32 [R or 1, 1]."""
        factor = self.factor
        chosen = factor[which] if isinstance(factor, np.ndarray) else np.float32(factor)
        return np.asarray(chosen, np.float32).reshape(-1, 1)

    def rows(self, which: Rows = ALL_ROWS) -> UInt8Array:
        """Return raw bytes in the model's row order, uint8 [rows, bytes of a row].

        A view of the file where the order is the file's, else a copy; not multiplied by `factor`.
        Every format keeps a row's blocks together, so reordering rows needs no decoding. Raises
        ModelFileError where rows are made of several tensors of a file and one of them is at fault.
        """
        if self.head_order is None:
            return self.stored[which]
        # Of a bias elements are what rows are of a matrix; it is stored as one row.
        of_heads = self.stored[ALL_ROWS].reshape(self.shape[0], -1)
        heads = of_heads.reshape(-1, len(self.head_order), of_heads.shape[1])
        return heads[:, self.head_order].reshape(self.stored.shape)[which]

    def to_float32(self) -> Float32Array:
        """Return the tensor decoded, float32 of `shape`, owning its memory.

        Raises ModelFileError if a value is not finite.
        """
        out = np.empty((self.stored.shape[0], self.shape[-1]), dtype=np.float32)
        decode_rows(self.rows(), self.format.label, out, path=self.path, name=self.stored_name)
        if self.added:
            out += np.float32(self.added)
        if self.holds_logarithms:
            with np.errstate(over="ignore"):
                np.negative(np.exp(out), out=out)
            if not np.isfinite(out).all():
                raise ModelFileError(
                    self.path, f"tensor {printable(self.stored_name)} holds too large logarithms"
                )
        if self.is_multiplied:
            out *= self.factors()
        return in_model_order(out, self.input_order).reshape(self.shape)


def in_model_order(columns: AnyArray, input_order: IntArray | None) -> AnyArray:
    """Return elements [rows, columns] of a tensor in the model's order of columns."""
    if input_order is None:
        return columns
    return np.take(columns, np.argsort(input_order), axis=1)


class TensorSource(Protocol):
    """A model's tensors by canonical name; nothing is decoded before it is asked for."""

    @property
    def names(self) -> Sequence[str]:
        """Canonical names of all tensors."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """Return one tensor. Raises KeyError for a name that is not in `names`."""
        ...

    def forget_pages(self) -> None:
        """Give back the memory that what was read of the files takes; they can be read again."""
        ...
