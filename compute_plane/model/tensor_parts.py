"""Tensors of a model that are some rows of one that a file holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from compute_plane.model.tensor import IntArray, PickedRows, RawTensor, RunOfRows, StoredRows


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Rows in runs of neighbours: `size` from `first` on, and again each `step` rows.

    `count`: how many runs.
    """

    first: int
    size: int
    step: int = 0
    count: int = 1

    @property
    def num_rows(self) -> int:
        """Rows of all runs."""
        return self.size * self.count

    def numbers(self) -> IntArray:
        """Return which rows they are, in this order."""
        begins = self.first + self.step * np.arange(self.count)
        return (begins[:, None] + np.arange(self.size)).reshape(-1)


@dataclass(frozen=True, slots=True)
class RowsOfPart:
    """Where a tensor of the model lies in one that a file holds, `stored`: all `runs`.

    `shape`: of the file's tensor, whose rows are those of all its dimensions but the last.
    """

    stored: str
    runs: tuple[RowRuns, ...]
    shape: tuple[int, ...]

    def rows_of(self, stored: StoredRows) -> StoredRows:
        """Return the rows."""
        if len(self.runs) == self.runs[0].count == 1:
            return RunOfRows(stored, self.runs[0].first, self.runs[0].size)
        return PickedRows(stored, np.concatenate([runs.numbers() for runs in self.runs]))

    def part_of(self, stored: RawTensor, name: str) -> RawTensor:
        """Return the rows as a tensor of the model, or as a bias, which is one of them."""
        is_vector = name.endswith(".bias")
        num_rows = sum(runs.num_rows for runs in self.runs)
        return dataclasses.replace(
            stored,
            name=name,
            shape=stored.shape[-1:] if is_vector else (num_rows, stored.shape[-1]),
            stored=self.rows_of(stored.stored),
        )


def rows_of_tensor(tensor: RawTensor, first: int, count: int) -> RawTensor:
    """Return neighbouring rows of a matrix of the model."""
    return dataclasses.replace(
        tensor, shape=(count, tensor.shape[1]), stored=RunOfRows(tensor.stored, first, count)
    )
