"""Matrices of heads that files hold transposed, with the rows of another matrix between."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.model.dequantize import decode_rows
from compute_plane.model.errors import ModelFileError, printable
from compute_plane.model.tensor import (
    RawTensor,
    Rows,
    TensorFormat,
    UInt8Array,
    in_model_order,
)

if TYPE_CHECKING:
    from compute_plane.model.tensor import AnyArray

FLOATS: Final = (TensorFormat.F32, TensorFormat.F16, TensorFormat.BF16)
"""Formats whose elements are turned as they are; others are decoded, and kept as DECODED."""
LEAST_GROUP: Final = 32
DECODED: Final = TensorFormat.F16
"""Loses 0.02 % of what four to eight bits hold, where a format of as many would lose 0.5 %."""


@dataclass(frozen=True, slots=True)
class TurnedHeads:
    """Where heads of the model, [R, N] each, lie in a file's tensor of `shape`, [H · step, R].

    `stored`: its name. Of a head's `step` rows there the first `num_rows`, N, are the columns of
    the model's.
    """

    stored: str
    shape: tuple[int, int]
    num_heads: int
    num_rows: int

    def part_of(self, stored: RawTensor, name: str) -> RawTensor:
        """Return the model's tensor, [H · R, N]."""
        fmt = stored.format if stored.format in FLOATS else DECODED
        return dataclasses.replace(
            stored,
            name=name,
            shape=(self.num_heads * self.shape[1], self.num_rows),
            format=fmt,
            stored=TurnedRows(stored, self, fmt),
            input_order=None,
            scale_group=LEAST_GROUP,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TurnedRows:
    """The rows of such heads; a `StoredRows`. `format`: what they are in."""

    of: RawTensor
    part: TurnedHeads
    format: TensorFormat

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, bytes of a row]."""
        part = self.part
        return part.num_heads * part.shape[1], self.format.row_bytes(part.num_rows)

    def __getitem__(self, which: Rows, /) -> UInt8Array:
        rank = self.part.shape[1]
        numbers = np.arange(self.shape[0])[which]
        out = np.empty((len(numbers), self.shape[1]), np.uint8)
        heads = numbers // rank
        for head in np.unique(heads):
            own = heads == head
            out[own] = np.ascontiguousarray(self._turned(int(head))[numbers[own] % rank]).view(
                np.uint8
            )
        return out

    def _turned(self, head: int) -> AnyArray:
        """Return a head's elements, [R, N]."""
        part, of = self.part, self.of
        first = head * (part.shape[0] // part.num_heads)
        rows = of.stored[first : first + part.num_rows]
        if of.format is self.format:
            element = np.uint32 if self.format is TensorFormat.F32 else np.uint16
            turned: AnyArray = np.ascontiguousarray(rows).view(element).T
            return turned
        values = np.empty((part.num_rows, part.shape[1]), np.float32)
        decode_rows(rows, of.format.label, values, path=of.path, name=of.stored_name)
        with np.errstate(over="ignore"):
            halves = in_model_order(values, of.input_order).astype(np.float16)
        if not np.isfinite(halves).all():
            raise ModelFileError(
                of.path, f"tensor {printable(of.stored_name)} holds too large weights for float16"
            )
        return halves.T
