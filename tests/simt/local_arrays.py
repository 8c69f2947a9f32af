"""Arrays of one thread: the same checks of every index, and no other thread to race with.

Most of a simulation's time goes by here. Elements are kept as lists of NumPy's scalars, a list a
row: a list's element is there, while an array would make a new scalar at each read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from tests.simt.memory import CheckedArray, Index, poisoned
from tests.simt.threads import Thread


@cache
def _poison(dtype: np.dtype) -> Any:
    """Return an element as a kernel finds it."""
    return poisoned(1, dtype)[0]


class LocalArray(CheckedArray):
    """An array of one or two axes, as a kernel finds it."""

    def __init__(
        self,
        name: str,
        shape: int | tuple[int, ...],
        dtype: np.dtype,
        current: Callable[[], Thread],
    ) -> None:
        self._name = name
        self._current = current
        self._shape = (shape,) if isinstance(shape, int) else shape
        self._num_axes = len(self._shape)
        self._type = dtype.type
        *num_rows, num_columns = self._shape
        row = [_poison(dtype)] * num_columns
        # One of them: an index of the other form finds nothing, and is refused by `_any_element`.
        self._row: list[Any] = [] if num_rows else row
        self._rows: list[list[Any]] = [row[:] for _ in range(num_rows[0])] if num_rows else []

    def __getitem__(self, index: Index) -> Any:
        try:
            if type(index) is tuple:
                row, column = index
                if row >= 0 and column >= 0:
                    return self._rows[row][column]
            elif index >= 0:
                return self._row[index]
        except (IndexError, TypeError, ValueError):
            pass
        return self._row[self._any_element(index)]

    def __setitem__(self, index: Index, value: Any) -> None:
        if type(value) is not self._type:
            value = self._type(value)
        try:
            if type(index) is tuple:
                row, column = index
                if row >= 0 and column >= 0:
                    self._rows[row][column] = value
                    return
            elif index >= 0:
                self._row[index] = value
                return
        except (IndexError, TypeError, ValueError):
            pass
        self._row[self._any_element(index)] = value

    def read_row(self, row: Any, length: int) -> np.ndarray:
        """Return the first elements of a row of an array of two axes."""
        self._element((row, length - 1))
        return np.array(self._rows[row][:length], self._type)

    def write_row(self, row: Any, values: Any) -> None:
        """Write the first elements of a row of an array of two axes."""
        length = len(values)
        self._element((row, length - 1))
        self._rows[row][:length] = list(np.asarray(values, self._type))
