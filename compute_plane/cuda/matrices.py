"""Weight matrices on the device, dense or quantised, and the product of rows with them.

A projection is what rows are multiplied with at one place of a layer: one matrix, or several where
a file stores what reads the same input in formats that run differently. Their outputs lie side by
side, so that the next operation need not know.

    qkv of a file with q, k in Q4_K and v in Q6_K     out [T, (H + 2·G)·D]
        Q4_K [(H + G)·D, E] │ Q6_K [G·D, E]           │ q      k  │ v  │
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from compute_plane.cuda.operations import DeviceOperations


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """`values`: [N, K], output features and input features, in the model's dtype."""

    values: Tensor

    @property
    def num_outputs(self) -> int:
        """Outputs N of a product."""
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return int(self.values.nbytes)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantizedMatrix:
    """A matrix [N, K] that stays quantised.

    `format`: its label in `kernels.cuda.quantized_formats`. `packed`: uint8 [`packed_bytes`], as
    `kernels.cuda.quantized_layout` draws it. `input_order`: int32 [K], which column of a row is
    multiplied with each of its own, None: each with the one in its place. `in_turns`: its rows are
    those of a gate and of what it gates, 16 of each in turns, and so are a product's columns.
    """

    format: str
    packed: Tensor
    num_outputs: int
    num_inputs: int
    input_order: Tensor | None = None
    in_turns: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        order_bytes = 0 if self.input_order is None else int(self.input_order.nbytes)
        return len(self.packed) + order_bytes


Matrix: TypeAlias = DenseMatrix | QuantizedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """`parts`: matrices of the same input, their outputs side by side."""

    parts: tuple[Matrix, ...]

    @property
    def gate_in_turns(self) -> QuantizedMatrix | None:
        """The only part, if it has a gate and what it gates in turns."""
        first, *others = self.parts
        if others or not isinstance(first, QuantizedMatrix) or not first.in_turns:
            return None
        return first

    @property
    def num_outputs(self) -> int:
        """Outputs of all parts."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(part.num_bytes for part in self.parts)


def project(
    x: Tensor,
    projection: Projection,
    operations: DeviceOperations,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Queue the product of rows x [T, K] with all parts; return it in `dtype`, [T, N].

    `dtype` is that of x, or float32. `bias`: [N], added to that of the only part.
    """
    parts = projection.parts
    assert bias is None or len(parts) == 1
    if len(parts) == 1 and isinstance(parts[0], DenseMatrix):
        product = dense_product(x, parts[0].values, dtype)
        return product if bias is None else product.add_(bias)
    out = torch.empty((len(x), projection.num_outputs), dtype=dtype, device=x.device)
    column = 0
    for part in parts:
        if isinstance(part, DenseMatrix):
            write_product(out[:, column : column + part.num_outputs], x, part.values)
        else:
            operations.quantized_matmul(out, inputs_in_order(x, part), part, column, bias)
        column += part.num_outputs
    return out


def inputs_in_order(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return the columns of rows [T, K] as a matrix is multiplied with them."""
    return x if matrix.input_order is None else x.index_select(1, matrix.input_order)


def dense_product(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x · weightᵀ in x's dtype or in float32.

    A CUDA device accumulates in float32 anyway and is told to write that; on a CPU both sides are
    converted.
    """
    if x.dtype == dtype:
        product: Tensor = x @ weight.t()
    elif x.device.type == "cuda":
        product = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        product = x.float() @ weight.float().t()
    return product


def product_in_parts(x: Tensor, weight: Tensor, num_parts: int) -> Tensor:
    """Return float32 [P, T, N], whose sum is x · weightᵀ: each part of so many inputs, in order."""
    rows = x.view(len(x), num_parts, -1).transpose(0, 1)
    weights = weight.view(len(weight), num_parts, -1).permute(1, 2, 0)
    if x.device.type == "cuda":
        return torch.bmm(rows, weights, out_dtype=torch.float32)
    return torch.bmm(rows.float(), weights.float())


def sum_of_parts(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two products, each [T, E] or parts of it, float32 [P, T, E]."""
    sums, added = (one, other) if one.dim() > other.dim() else (other, one)
    if sums.dim() == added.dim() == 2:
        return sums.add_(added)
    sums[0] += added if added.dim() == 2 else added.sum(0)
    return sums


def write_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write x · weightᵀ; `out`: [T, N], columns of a wider tensor, as in `dense_product`."""
    if x.dtype == out.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        out.copy_(dense_product(x, weight, out.dtype))
