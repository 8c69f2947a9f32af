"""The work of packing: the matrices that are planned, cut into pieces that threads can share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import ALL_ROWS, IntArray, RawTensor, Rows, TensorFormat
from kernels.cpu.float_packing import FLOAT_TYPES, pack_float_rows, packed_float_bytes
from kernels.cpu.int8_packing import PANEL_COLUMNS, packed_int8_bytes
from kernels.cpu.int8_turning import pack_int8_rows

UInt8Array = npt.NDArray[np.uint8]

ROWS_AT_ONCE: Final = 1024
"""Rows of a matrix one thread packs in one go; a multiple of a panel."""


@dataclass(frozen=True, slots=True, eq=False)
class PackingJob:
    """Tensors to be converted and packed into `out`, one behind the other.

    `which`: the rows of each, in the order in which they are packed. `vector_factor`: of vectors of
    float32, which are not packed, what they are multiplied by; None: it is a matrix.
    `is_turned`: of vectors that are matrices, columns follow each other, not rows.
    """

    tensors: Sequence[RawTensor]
    target: TensorFormat
    out: UInt8Array
    which: Rows
    vector_factor: float | None = None
    is_turned: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes that it writes."""
        return self.out.nbytes

    def run(self) -> None:
        """Do it. Raises ModelFileError if a weight is not finite or does not fit."""
        if self.vector_factor is not None:
            decoded = [tensor.to_float32() for tensor in self.tensors]
            vectors = [(each.T if self.is_turned else each).reshape(-1) for each in decoded]
            values = np.concatenate(vectors) * np.float32(self.vector_factor)
            self.out[:] = values.view(np.uint8)
            return
        parts = [converted_tensor(tensor, self.target, self.which) for tensor in self.tensors]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.target.label in FLOAT_TYPES:
            pack_float_rows(self.target.label, rows, self.tensors[0].shape[1], self.out)
        else:
            pack_int8_rows(self.target.label, rows, self.tensors[0].shape[1], self.out)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMatrix:
    """Tensors whose rows become one packed matrix, one behind the other.

    `row_order`: the order in which the rows of each are packed; None: the model's.
    """

    tensors: Sequence[RawTensor]
    target: TensorFormat
    row_order: IntArray | None

    def jobs(self, memory: UInt8Array) -> list[PackingJob]:
        """Return what is to be done; `memory`: all of the matrix, `packed_bytes`."""
        if any(tensor.shape[0] % PANEL_COLUMNS for tensor in self.tensors[:-1]):
            # A panel holds rows of two tensors: they are packed together.
            return [PackingJob(self.tensors, self.target, memory, self._rows(ALL_ROWS))]
        panel = packed_bytes(self.target, PANEL_COLUMNS, self.tensors[0].shape[1])
        jobs, first = [], 0
        for tensor in self.tensors:
            num_panels = -(-tensor.shape[0] // PANEL_COLUMNS)
            jobs += self._pieces(
                tensor, memory[first * panel : (first + num_panels) * panel], panel
            )
            first += num_panels
        return jobs

    def _pieces(self, tensor: RawTensor, out: UInt8Array, panel_bytes: int) -> list[PackingJob]:
        """Cut the packing of one tensor; heads are put in order for all rows of it at once."""
        if tensor.head_order is not None:
            return [PackingJob([tensor], self.target, out, self._rows(ALL_ROWS))]
        step = ROWS_AT_ONCE // PANEL_COLUMNS * panel_bytes
        begins = range(0, tensor.shape[0], ROWS_AT_ONCE)
        runs = (self._rows(slice(first, first + ROWS_AT_ONCE)) for first in begins)
        return [
            PackingJob([tensor], self.target, out[step * i : step * (i + 1)], run)
            for i, run in enumerate(runs)
        ]

    def _rows(self, run: slice) -> Rows:
        """Return which rows of a tensor a run of the packed ones is."""
        return run if self.row_order is None else self.row_order[run]


def packed_bytes(target: TensorFormat, n: int, k: int) -> int:
    """Return the bytes of a packed matrix [n, k]."""
    size: Callable[[str, int, int], int] = (
        packed_float_bytes if target.label in FLOAT_TYPES else packed_int8_bytes
    )
    return size(target.label, n, k)
