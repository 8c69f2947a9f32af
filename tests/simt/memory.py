"""Arrays that check every access: bounds always, and for memory that threads share, races.

A race is judged by happens-before, not by what happened to be read: an access is ordered after an
earlier one of another thread only if a block barrier, or for threads of one warp a `syncwarp`, lies
between. Threads of different blocks are never ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.simt.faults import OutOfBounds, Race, Unsupported
from tests.simt.threads import Thread

Index = Any  # what a kernel writes between brackets: an integer or a tuple of them


class Access:
    """One access: by which thread, and how often that thread had been synchronised by then."""

    __slots__ = ("barriers", "thread", "warp_barriers")

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.barriers = thread.barriers
        self.warp_barriers = thread.warp_barriers

    def is_before(self, thread: Thread) -> bool:
        """Return whether this access is over for certain when `thread` makes one now."""
        mine = self.thread
        if mine is thread:
            return True
        if mine.block is not thread.block:
            return False
        if thread.barriers > self.barriers:
            return True
        return mine.warp == thread.warp and thread.warp_barriers > self.warp_barriers


class CheckedArray:
    """An array of one address space, indexed from 0 to its end and by integers only."""

    def __init__(self, name: str, values: np.ndarray, current: Callable[[], Thread]) -> None:
        self._name = name
        self._values = values
        self._shape = values.shape
        self._current = current

    def __getitem__(self, index: Index) -> Any:
        return self._values[self._checked(index)]

    def __setitem__(self, index: Index, value: Any) -> None:
        self._values[self._checked(index)] = value

    def _checked(self, index: Index) -> tuple[int, ...]:
        indices = index if type(index) is tuple else (index,)
        if len(indices) != len(self._shape):
            raise Unsupported(f"{self._name}: {len(indices)} indices for {len(self._shape)} axes")
        for one, size in zip(indices, self._shape, strict=True):
            if not isinstance(one, (int, np.integer)):
                raise Unsupported(f"{self._name}: index {one!r} is not an integer")
            if not 0 <= one < size:
                shown = ", ".join(str(int(i)) for i in indices)
                message = f"{self._name}[{shown}] of shape {self._shape} by {self._current()}"
                raise OutOfBounds(message)
        return indices


class SharedArray(CheckedArray):
    """Memory that several threads touch: global memory, or the shared memory of a block."""

    def __init__(self, name: str, values: np.ndarray, current: Callable[[], Thread]) -> None:
        super().__init__(name, values, current)
        self._writes: dict[tuple[int, ...], Access] = {}
        self._reads: dict[tuple[int, ...], dict[Thread, Access]] = {}

    def __getitem__(self, index: Index) -> Any:
        indices = self._checked(index)
        thread = self._current()
        self._refuse_race(self._writes.get(indices), thread, "read", "written", indices)
        self._reads.setdefault(indices, {})[thread] = Access(thread)
        return self._values[indices]

    def __setitem__(self, index: Index, value: Any) -> None:
        indices = self._checked(index)
        thread = self._current()
        self._refuse_race(self._writes.get(indices), thread, "written", "written", indices)
        for read in self._reads.pop(indices, {}).values():
            self._refuse_race(read, thread, "written", "read", indices)
        self._writes[indices] = Access(thread)
        self._values[indices] = value

    def _refuse_race(
        self, earlier: Access | None, thread: Thread, now: str, before: str, indices: Index
    ) -> None:
        if earlier is None or earlier.is_before(thread):
            return
        shown = ", ".join(str(int(i)) for i in indices)
        raise Race(
            f"{self._name}[{shown}] is {now} by {thread}, with no barrier since it was {before} "
            f"by {earlier.thread}"
        )


class ReadOnlyArray(CheckedArray):
    """Global memory that the kernel may not write, so that reads need no bookkeeping."""

    def __setitem__(self, index: Index, value: Any) -> None:
        raise Unsupported(f"{self._name} was given as read-only and is written")


def poisoned(shape: Index, dtype: np.dtype) -> np.ndarray:
    """Return memory as a kernel finds it: whatever was there before, here the worst of it."""
    if dtype.kind == "f":
        return np.full(shape, np.nan, dtype)
    return np.full(shape, np.iinfo(dtype).max // 3 * 2, dtype)
