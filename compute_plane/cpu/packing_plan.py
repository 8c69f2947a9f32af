"""A plan of where every tensor goes, made before there is memory for it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.packed_layers import MatrixPart, PackedMatrix, PackedMlp
from compute_plane.cpu.packing_jobs import PackingJob, PlannedMatrix, packed_bytes
from compute_plane.executor.weight_formats import format_to_run, input_order_of
from compute_plane.model.tensor import ALL_ROWS, IntArray, RawTensor, TensorFormat

UInt8Array = npt.NDArray[np.uint8]

ALIGNMENT: Final = 64


class PackingPlan:
    """Where every tensor goes; made before the memory is."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._vectors: list[tuple[RawTensor, int, float, bool]] = []
        self._matrices: list[tuple[PlannedMatrix, PackedMatrix]] = []
        self.elements: Counter[tuple[TensorFormat, TensorFormat]] = Counter()
        self.parts: dict[int, list[MatrixPart]] = {}
        self.num_bytes = 0

    def vector(self, *tensors: RawTensor, factor: float = 1.0, is_turned: bool = False) -> int:
        """Take a place for a vector of float32, of all `tensors`, and return its offset.

        `factor`: what its elements are multiplied by. `is_turned`: of a matrix that is stored as
        one, columns follow each other.
        """
        start = at = self._take(4 * sum(tensor.num_elements for tensor in tensors))
        for tensor in tensors:
            self._vectors.append((tensor, at, factor, is_turned))
            at += 4 * tensor.num_elements
        return start

    def matrix(
        self,
        tensors: Sequence[RawTensor],
        first_column: int = 0,
        row_order: IntArray | None = None,
        target: TensorFormat | None = None,
    ) -> PackedMatrix:
        """Take a place for a matrix of the rows of all `tensors`, which run in one way.

        `row_order`: the order in which the rows of each are packed; None: the model's. `target`:
        the format it runs in; None: as the dtype says.
        """
        target = target or format_to_run(tensors[0], self._dtype)
        n, k = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
        size = packed_bytes(target, n, k)
        order = input_order_of(tensors[0], target)
        matrix = PackedMatrix(
            target.label, n, k, self._take(size), size, first_column,
            None if order is None else order.astype(np.int32),
        )  # fmt: skip
        self._matrices.append((PlannedMatrix(tensors, target, row_order), matrix))
        if order is None and row_order is None:
            ends = itertools.accumulate(tensor.shape[0] for tensor in tensors)
            self.parts[matrix.address] = [
                MatrixPart(tensor.name, target.label, end - tensor.shape[0], tensor.shape[0])
                for tensor, end in zip(tensors, ends, strict=True)
            ]
        for tensor in tensors:
            self.elements[tensor.format, target] += tensor.num_elements
        return matrix

    def fused(
        self, tensors: Sequence[RawTensor], row_order: IntArray | None = None
    ) -> tuple[PackedMatrix, ...]:
        """Take places for matrices with the same input: one for each run that is read alike."""
        matrices: list[PackedMatrix] = []
        column = 0

        def way_of(tensor: RawTensor) -> tuple[TensorFormat, bytes | None]:
            order = self.input_order(tensor)
            target = format_to_run(tensor, self._dtype)
            return target, None if order is None else order.tobytes()

        for _, run in itertools.groupby(tensors, way_of):
            matrices.append(self.matrix(list(run), column, row_order))
            column += matrices[-1].n
        return tuple(matrices)

    def mlp(self, gate_up: Sequence[RawTensor], down: RawTensor) -> PackedMlp:
        """Take places for the matrices of an MLP. `gate_up`: without gate where there is none."""
        order = self.input_order(down)
        if order is not None:
            down = replace(down, input_order=None)
        mlp = PackedMlp(self.fused(gate_up, order), self.matrix([down]))
        if order is not None:  # nor are the inputs of this one in the model's
            del self.parts[mlp.down.address]
        return mlp

    def input_order(self, tensor: RawTensor) -> IntArray | None:
        """Return the order in which a matrix, as it runs, wants its inputs; None: the model's."""
        return input_order_of(tensor, format_to_run(tensor, self._dtype))

    def jobs(self, memory: UInt8Array) -> list[PackingJob]:
        """Return what is to be done, in pieces that threads can share."""
        jobs = []
        for tensor, start, factor, is_turned in self._vectors:
            out = memory[start : start + 4 * tensor.num_elements]
            jobs.append(PackingJob([tensor], TensorFormat.F32, out, ALL_ROWS, factor, is_turned))
        for planned, matrix in self._matrices:
            jobs += planned.jobs(memory[matrix.address : matrix.address + matrix.num_bytes])
        return jobs

    def converted(self) -> list[tuple[RawTensor, TensorFormat]]:
        """Return the tensors that run in another format than their file's, with that format."""
        return [
            (tensor, planned.target)
            for planned, _ in self._matrices
            for tensor in planned.tensors
            if tensor.format is not planned.target
        ]

    def _take(self, num_bytes: int) -> int:
        start = self.num_bytes
        self.num_bytes = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return start
