"""Operations that note which of them a layer's products call, and drawn factors."""

from __future__ import annotations

from typing import Any

import torch

from compute_plane.cuda.dense_kernels import MOST_ROWS
from compute_plane.cuda.matrices import DenseMatrix, Projection, QuantizedMatrix
from compute_plane.cuda.next_product import NextProduct
from compute_plane.cuda.reference_operations import ReferenceOperations

EPS = 1e-5
SIZE, FEATURES, VOCAB = 32, 64, 40


class Recording:
    """Notes what is called; of a device whose products normalise, or do not, or are not there."""

    def __init__(
        self,
        *,
        normalises: bool = True,
        most_rows: int = MOST_ROWS,
        gated_rows: int = 0,
        num_parts: int = 1,
    ) -> None:
        self.normalises = normalises
        self.gated_rows = gated_rows
        self.most_rows = most_rows
        self.num_parts = num_parts
        self.operations = ReferenceOperations()
        self.calls: list[str] = []
        self.told: list[NextProduct] = []

    def takes_product(self, num_rows: int, weight: torch.Tensor) -> bool:  # noqa: ARG002
        return num_rows <= self.most_rows

    def num_product_parts(self, num_rows: int, weight: torch.Tensor) -> int:  # noqa: ARG002
        return self.num_parts

    def normalises_product(self, weight: torch.Tensor) -> bool:  # noqa: ARG002
        return self.normalises

    def takes_gate(self, num_rows: int, matrix: QuantizedMatrix) -> bool:  # noqa: ARG002
        return num_rows <= self.gated_rows

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        operation = getattr(self.operations, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            self.told += [one for one in given if isinstance(one, NextProduct)]
            return operation(*args, **kwargs)

        return noted

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def dense(num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> Projection:
    return Projection((DenseMatrix(drawn(num_outputs, num_inputs, dtype=dtype) / 8),))
