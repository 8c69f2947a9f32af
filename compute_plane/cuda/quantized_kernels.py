"""The kernels that read quantised weights, and when each is taken.

Few rows are multiplied by `kernels.cuda.quantized_matmul`, which reads the weights as they are; for
more than `kernels.cuda.quantized_strands.most_rows_of`, where the reasons are, a matrix is unpacked
into scratch memory and torch multiplies:

    W [N, K] packed │ panels … │ panels … │        a run of panels fills the scratch,
                         ↓ quantized_rows
    scratch         │ rows of W, 16 bits  │        is multiplied into its columns of out,
                         ↓ torch.mm
    out [T, N]      │ columns  │                   and the next run takes its place

The scratch is made once, before anything is captured as a graph, and all products use it in turn:
they are on one stream. Its bound holds a matrix of a layer of eight billion parameters whole, so
that a library's product has tiles enough for every multiprocessor; only a vocabulary is cut.

An embedding stays quantised too: a dense copy of it would take two to four times the bytes, for a
table of which a step reads a row a token. Where it is tied it is the logits' very matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from compute_plane.cuda.matrices import write_product
from compute_plane.cuda.weight_plan import QuantizedUses
from compute_plane.cuda.weights import DTYPES
from kernels.cuda.quantized_formats import PANEL_ROWS, packed_bytes
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from kernels.cuda.quantized_strands import COLUMNS, columns_of, most_rows_of

if TYPE_CHECKING:
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.matrices import QuantizedMatrix
    from kernels.cuda.variant import Variant

UNQUANTISED: Final = QuantizedUses()
SCRATCH_BYTES: Final = 256 << 20
"""At most, for unpacked weights."""


class QuantizedKernels:
    """Products with quantised matrices and their rows, for the formats of one model.

    `dtype`: of a step, by name. `activation`: of gates with what they gate; None: there are none
    but experts'. Raises UnsupportedVariantError for a dtype that no kernel is written for.
    """

    def __init__(
        self, launcher: Launcher, dtype: str, uses: QuantizedUses, activation: str | None
    ) -> None:
        self._launcher = launcher
        self._products = {
            (label, columns, is_head): QuantizedMatmulVariant(
                label, dtype, columns, writes_float32=is_head
            )
            for is_head, labels in ((False, uses.layers), (True, uses.lm_head))
            for label in sorted(labels)
            for columns in COLUMNS
        }
        self._biased = {
            (label, columns): QuantizedMatmulVariant(label, dtype, columns, biased=True)
            for label in sorted(uses.biased)
            for columns in COLUMNS
        }
        self._gates = {
            (label, columns): QuantizedMatmulVariant(
                label, dtype, columns, gates=True, activation=activation
            )
            for label in sorted(uses.gates)
            for columns in COLUMNS
            if activation is not None
        }
        every = uses.layers | uses.lm_head | uses.embedding
        self._rows = {label: QuantizedRowsVariant(label, dtype) for label in sorted(every)}
        most = SCRATCH_BYTES // DTYPES[dtype].itemsize
        size = min(most, uses.num_weights)
        self._scratch = torch.empty(size, dtype=DTYPES[dtype], device=launcher.device)
        self._order = torch.arange(uses.num_outputs, dtype=torch.int32, device=launcher.device)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        products = *self._products.values(), *self._biased.values(), *self._gates.values()
        return [*products, *self._rows.values()]

    def unpack_rows(self, out: Tensor, matrix: QuantizedMatrix, rows: Tensor) -> None:
        """Write row rows[t] of a matrix to out[t]; `out`: [T, K], `rows`: int32 [T]."""
        self._unpack(out, matrix.format, matrix.packed, rows)

    def matmul(
        self,
        out: Tensor,
        x: Tensor,
        matrix: QuantizedMatrix,
        first_column: int,
        bias: Tensor | None = None,
    ) -> None:
        """Write x · Wᵀ to columns of `out`, as in `DeviceOperations`."""
        num_outputs, columns = matrix.num_outputs, columns_of(len(x))
        if len(x) > most_rows_of(matrix.format):
            self._multiply_unpacked(out, x, matrix, first_column)
            if bias is not None:
                out[:, first_column : first_column + num_outputs] += bias
            return
        is_head = out.dtype != x.dtype  # which alone has float32 written
        variant = self._products[matrix.format, columns, is_head]
        if bias is not None:
            variant = self._biased[matrix.format, columns]
        # Memory from the first of the columns on: rows of `out` are its whole width apart.
        own = out.view(-1)[first_column:]
        self._launch(variant, own, x, matrix, num_outputs, out.shape[1], bias)

    def takes_gate(self, num_rows: int, matrix: QuantizedMatrix) -> bool:
        """Whether so many rows are gated with their product."""
        return bool(self._gates) and num_rows <= most_rows_of(matrix.format)

    def gate(self, out: Tensor, x: Tensor, matrix: QuantizedMatrix) -> None:
        """Write activation(gate) · up, as in `DeviceOperations`."""
        variant = self._gates[matrix.format, columns_of(len(x))]
        self._launch(variant, out, x, matrix, out.shape[1], out.shape[1])

    def _launch(
        self,
        variant: QuantizedMatmulVariant,
        out: Tensor,
        x: Tensor,
        matrix: QuantizedMatrix,
        num_outputs: int,
        width: int,
        bias: Tensor | None = None,
    ) -> None:
        sizes = len(x), num_outputs, matrix.num_inputs, variant.strand_bits(num_outputs)
        grid = variant.grid(*sizes)
        biases = x if bias is None else bias
        self._launcher.launch(variant, grid, out, x, matrix.packed, *sizes, width, biases)

    def _multiply_unpacked(
        self, out: Tensor, x: Tensor, matrix: QuantizedMatrix, first_column: int
    ) -> None:
        """Unpack and multiply, as many panels at a time as the scratch memory holds."""
        num_inputs = matrix.num_inputs
        panel_bytes = packed_bytes(matrix.format, PANEL_ROWS, num_inputs)
        most = len(self._scratch) // num_inputs
        if most < matrix.num_outputs:
            most -= most % PANEL_ROWS
        for first in range(0, matrix.num_outputs, most):
            count = min(most, matrix.num_outputs - first)
            weights = self._scratch[: count * num_inputs].view(count, num_inputs)
            packed = matrix.packed[first // PANEL_ROWS * panel_bytes :]
            self._unpack(weights, matrix.format, packed, self._order[:count])
            column = first_column + first
            write_product(out[:, column : column + count], x, weights)

    def _unpack(self, out: Tensor, label: str, packed: Tensor, rows: Tensor) -> None:
        variant = self._rows[label]
        grid = variant.grid(*out.shape)
        self._launcher.launch(variant, grid, out, packed, rows, *out.shape)
