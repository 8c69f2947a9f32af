"""A matrix or a vector of a model as it will lie on the device: planned, then placed there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compute_plane.cuda.matrices import DenseMatrix, Matrix, Projection, QuantizedMatrix
from compute_plane.cuda.weights import DTYPES
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import IntArray, RawTensor, Rows, TensorFormat, UInt8Array
from kernels.cuda.quantized_formats import (
    FORMATS,
    GATE_TURN,
    PANEL_ROWS,
    label_for,
    packed_bytes,
)
from kernels.cuda.quantized_layout import pack_rows

DENSE_FORMATS: Final = {
    "float32": TensorFormat.F32,
    "bfloat16": TensorFormat.BF16,
    "float16": TensorFormat.F16,
}
ORDER_TYPE: Final = torch.int32
"""Of the order of inputs."""
BYTES_AT_ONCE: Final = 16 << 20
"""Of rows that are converted at a time, about."""
TORCH_TYPES: Final = {DENSE_FORMATS[name]: dtype for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMatrix:
    """Tensors of the same input whose rows become one matrix, or vectors that become one.

    `row_order`: the order in which the rows of each are placed; None: the model's. `num_stacked`:
    how many matrices it is that rows are multiplied with one by one, of equal sizes. `in_turns`: a
    quantised one's tensors are gates and what they gate, of equal sizes, whose rows are placed in
    turns of `GATE_TURN`.
    """

    tensors: tuple[RawTensor, ...]
    target: TensorFormat
    row_order: IntArray | None = None
    num_stacked: int = 1
    in_turns: bool = False

    @property
    def is_vector(self) -> bool:
        """Whether it is no matrix."""
        return len(self.tensors[0].shape) == 1

    @property
    def is_quantised(self) -> bool:
        """Whether it stays quantised."""
        return self.target.label in FORMATS

    @property
    def label(self) -> str:
        """The label of its format: of a quantised one, with the span that its scales are for."""
        if not self.is_quantised:
            return self.target.label
        group = math.gcd(*(tensor.scale_group for tensor in self.tensors))
        return label_for(self.target.label, group)

    @property
    def num_inputs(self) -> int:
        """Inputs K; of vectors all elements."""
        if self.is_vector:
            return sum(tensor.num_elements for tensor in self.tensors)
        return self.tensors[0].shape[-1]

    @property
    def num_outputs(self) -> int:
        """Outputs N; of a vector 1."""
        return sum(tensor.num_elements for tensor in self.tensors) // self.num_inputs

    @property
    def input_order(self) -> IntArray | None:
        """The order of the inputs, of a matrix that stays quantised, if it is not the model's."""
        return self.tensors[0].input_order

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        if self.is_quantised:
            order_bytes = 0 if self.input_order is None else ORDER_TYPE.itemsize * self.num_inputs
            packed = packed_bytes(self.label, self.num_outputs, self.num_inputs)
            return packed + order_bytes
        return self.num_outputs * self.target.row_bytes(self.num_inputs)

    def place(self, device: torch.device) -> Matrix:
        """Read, convert and copy it to a device.

        Raises ModelFileError if a weight is not finite or too large for its format.
        """
        if self.is_vector:
            parts = [converted_tensor(tensor, self.target) for tensor in self.tensors]
            return self._dense(_on(device, np.concatenate(parts, axis=1)))
        if not self.is_quantised:
            row_bytes = self.target.row_bytes(self.num_inputs)
            stored = torch.empty((self.num_outputs, row_bytes), dtype=torch.uint8, device=device)
            _fill(stored, self._rows())
            return self._dense(stored)
        label, shape = self.label, (self.num_outputs, self.num_inputs)
        packed = torch.empty(packed_bytes(label, *shape), dtype=torch.uint8, device=device)
        whole = whole_panels(self._rows())
        _fill(packed, (pack_rows(label, rows, self.num_inputs) for rows in whole))
        order = None
        if self.input_order is not None:
            order = torch.from_numpy(self.input_order).to(device, ORDER_TYPE)
        return QuantizedMatrix(label, packed, *shape, order, in_turns=self.in_turns)

    def _dense(self, stored: Tensor) -> DenseMatrix:
        return DenseMatrix(stored.view(TORCH_TYPES[self.target]))

    def _rows(self) -> Iterator[UInt8Array]:
        """Yield the rows as they lie one behind the other, converted, some at a time.

        A stack of experts may be gigabytes, and several are placed at a time: the host has what one
        of these makes, not the stack.
        """
        each = 2 if self.in_turns else 1
        for first in range(0, len(self.tensors), each):
            tensors = self.tensors[first : first + each]
            for which in self._parts_of(tensors[0]):
                rows = [converted_tensor(tensor, self.target, which) for tensor in tensors]
                yield rows[0] if each == 1 else _in_turns(rows)

    def _parts_of(self, tensor: RawTensor) -> Iterator[Rows]:
        """Yield which rows of a tensor are converted at a time."""
        num_rows = tensor.shape[0]
        step = num_rows
        if not tensor.is_stored_otherwise:  # that is converted as a whole
            row_bytes = self.target.row_bytes(self.num_inputs)
            step = max(1, BYTES_AT_ONCE // (PANEL_ROWS * row_bytes)) * PANEL_ROWS
        for first in range(0, num_rows, step):
            part = slice(first, first + step)
            yield part if self.row_order is None else self.row_order[part]


def whole_panels(parts: Iterable[UInt8Array]) -> Iterator[UInt8Array]:
    """Yield rows [R, bytes] anew, so that all but the last are a number of whole panels."""
    rest: list[UInt8Array] = []
    for rows in parts:
        num_rest = sum(map(len, rest))
        num_whole = (num_rest + len(rows)) // PANEL_ROWS * PANEL_ROWS - num_rest
        if num_whole <= 0:
            rest.append(rows)
            continue
        whole = rows[:num_whole]
        yield np.concatenate([*rest, whole]) if rest else whole
        rest = [rows[num_whole:]] if num_whole < len(rows) else []
    if rest:
        yield np.concatenate(rest)


def _in_turns(rows: list[UInt8Array]) -> UInt8Array:
    """Return the rows of a gate and of what it gates, [R, bytes] each, in turns of `GATE_TURN`."""
    turns = np.stack([one.reshape(-1, GATE_TURN, one.shape[1]) for one in rows], axis=1)
    return turns.reshape(-1, turns.shape[-1])


def _fill(out: Tensor, parts: Iterable[UInt8Array]) -> None:
    """Copy arrays one behind the other, along the first axis."""
    at = 0
    for part in parts:
        out[at : at + len(part)].copy_(_on(out.device, part))
        at += len(part)


def _on(device: torch.device, values: UInt8Array) -> Tensor:
    """Return an array's values on a device."""
    # A view of the mapped file is read-only, which torch warns of: that is copied.
    return torch.from_numpy(np.require(values, requirements=("C", "W"))).to(device)


Placed: TypeAlias = Callable[[PlannedMatrix], Matrix]
"""Gives a planned matrix where it lies."""


def values_of(matrix: Matrix) -> Tensor:
    """Return the values of one that is not quantised; of a vector [1, n]."""
    assert isinstance(matrix, DenseMatrix)
    return matrix.values


def projection_of(placed: Placed, parts: Iterable[PlannedMatrix]) -> Projection:
    """Return what rows are multiplied with at one place, where it lies."""
    return Projection(tuple(placed(part) for part in parts))
