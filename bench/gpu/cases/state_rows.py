"""Rows of a step that go on from states, or begin; the same tokens in one step or in two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Expected
from kernels.cuda.recurrent_states import ROW_NUMBERS


@dataclass(frozen=True, slots=True)
class Row:
    """Some tokens of a sequence: its state, how many in the first step, how many in the second."""

    state: int
    is_new: bool
    first: int
    second: int

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return self.first + self.second


def tokens_of(rows: Sequence[Row]) -> int:
    """Return how many tokens rows have together, with one behind them that is padding."""
    return sum(row.num_tokens for row in rows) + 1


def rows_with_tokens(rows: Sequence[Row]) -> Iterator[tuple[Row, slice]]:
    """Yield rows that have any, each with its tokens."""
    begin = 0
    for row in rows:
        if row.num_tokens:
            yield row, slice(begin, begin + row.num_tokens)
        begin += row.num_tokens


def row_table(rows: Sequence[Row], step: int | None) -> Array:
    """Return the rows of one of the two steps, of both where it is None; then two empty ones.

    An empty row has zeros wherever its tokens would begin.
    """
    table = np.zeros((len(rows) + 2, ROW_NUMBERS), np.int32)
    begin = 0
    for number, row in enumerate(rows):
        whole = row.num_tokens
        first, count = {None: (0, whole), 0: (0, row.first), 1: (row.first, row.second)}[step]
        if count:
            table[number] = begin + first, count, row.state, row.is_new and first == 0
        begin += whole
    return table


def token_rows(rows: Sequence[Row]) -> Array:
    """Return the row of each token; the padding's is an empty one."""
    counts = [row.num_tokens for row in rows]
    return np.repeat(np.arange(len(rows) + 1), [*counts, 1]).astype(np.int32)


def judged(dtype: str, values: Array) -> Expected:
    """Judge by the dtype's tolerance, or its precision where values are large."""
    largest = max(1.0, float(np.nanmax(np.abs(values))) / 4)
    return Expected(dtype, np.asarray(values, np.float64), TOLERANCES[dtype] * largest)
