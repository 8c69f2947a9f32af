"""A matrix or a vector of a model as it will lie on the device: planned, then placed there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compute_plane.cuda.matrices import DenseMatrix, Matrix, Projection, QuantizedMatrix
from compute_plane.cuda.weights import DTYPES
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import ALL_ROWS, IntArray, RawTensor, TensorFormat
from kernels.cuda.quantized_formats import FORMATS, GATE_TURN, label_for, packed_bytes
from kernels.cuda.quantized_layout import pack_rows

DENSE_FORMATS: Final = {
    "float32": TensorFormat.F32,
    "bfloat16": TensorFormat.BF16,
    "float16": TensorFormat.F16,
}
ORDER_TYPE: Final = torch.int32
"""Of the order of inputs."""
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
        which = ALL_ROWS if self.row_order is None else self.row_order
        parts = [converted_tensor(tensor, self.target, which) for tensor in self.tensors]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=int(self.is_vector))
        if self.in_turns:
            turns = rows.reshape(len(parts) // 2, 2, -1, GATE_TURN, rows.shape[1])
            rows = np.ascontiguousarray(turns.swapaxes(1, 2)).reshape(rows.shape)
        if self.is_quantised:
            packed = torch.from_numpy(pack_rows(self.label, rows, self.num_inputs))
            order = None
            if self.input_order is not None:
                order = torch.from_numpy(self.input_order).to(device, ORDER_TYPE)
            shape = self.num_outputs, self.num_inputs
            return QuantizedMatrix(
                self.label, packed.to(device), *shape, order, in_turns=self.in_turns
            )
        # A view of the mapped file is read-only, which torch warns of: that is copied.
        stored = torch.from_numpy(np.require(rows, requirements=("C", "W")))
        return DenseMatrix(stored.view(TORCH_TYPES[self.target]).to(device))


Placed: TypeAlias = Callable[[PlannedMatrix], Matrix]
"""Gives a planned matrix where it lies."""


def values_of(matrix: Matrix) -> Tensor:
    """Return the values of one that is not quantised; of a vector [1, n]."""
    assert isinstance(matrix, DenseMatrix)
    return matrix.values


def projection_of(placed: Placed, parts: Iterable[PlannedMatrix]) -> Projection:
    """Return what rows are multiplied with at one place, where it lies."""
    return Projection(tuple(placed(part) for part in parts))
