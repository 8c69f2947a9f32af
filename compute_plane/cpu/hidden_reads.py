"""How the hidden states of a piece are read: as they are, or normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from compute_plane.cpu.product_records import float_bits
from kernels.cpu.catalogue import normed_rows, plain_rows
from kernels.cpu.operands import RowInput
from kernels.cpu.operation import Operation, StepWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cpu.packed_layers import PackedMatrix
    from compute_plane.model.spec import ModelSpec

RowsRead: TypeAlias = "tuple[Operation, Sequence[PackedMatrix], dict[int, int]]"
"""What `ProductRecords.rows` takes."""


class HiddenReads:
    """`address`: of float32 [tokens of the step, hidden]. `epsilon`: of norms, the bits."""

    def __init__(self, spec: ModelSpec, address: int) -> None:
        self.address = address
        self.epsilon = float_bits(spec.rms_norm_eps)
        self.plain: dict[int, int] = {
            RowInput.SOURCE: address,
            RowInput.SOURCE_STRIDE: spec.hidden_size,
            RowInput.SOURCE_FIRST_WORD: StepWord.FIRST_TOKEN,
        }

    def normed(self, weight: int) -> dict[int, int]:
        """Return the operands of what reads them normalised. `weight`: address of the norm's."""
        return {**self.plain, RowInput.WEIGHT: weight, RowInput.EPSILON: self.epsilon}

    def read(self, norm: int | None, matrices: Sequence[PackedMatrix]) -> RowsRead:
        """Return how matrices read them: normalised, or as they are where there is no norm."""
        if norm is None:
            return plain_rows, matrices, self.plain
        return normed_rows, matrices, self.normed(norm)
