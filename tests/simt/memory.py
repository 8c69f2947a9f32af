"""Arrays that check every access: bounds and alignment always, and for shared memory races.

A race is judged by happens-before, not by what happened to be read: an access is ordered after an
earlier one of another thread only if a block barrier, or for threads of one warp a `syncwarp`, lies
between. Threads of different blocks are ordered by fences and atomic instructions (`threads`); what
another block wrote is then read where all blocks see it, not by an ordinary read, which may find
what the multiprocessor's first cache still has. An asynchronous copy owns the elements it
writes from its start until its thread has waited for it: nobody may touch them meanwhile, the
thread itself included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index as as_integer
from typing import Any

import numpy as np

from tests.simt.access import Access
from tests.simt.faults import Misaligned, OutOfBounds, Race, TooEarly, Unsupported
from tests.simt.threads import Knowledge, Thread, everything_known

Index = Any  # what a kernel writes between brackets: an integer or a tuple of them

GLOBAL_ALIGNMENT = 256  # bytes, of what a device allocates
FETCHED_UNIT = 16  # bytes, of which place and length of what is fetched are multiples


class CheckedArray:
    """An array of one address space, indexed from 0 to its end and by integers only.

    `alignment` is what the address of its first element is a multiple of, in bytes.
    """

    def __init__(
        self, name: str, values: np.ndarray, current: Callable[[], Thread], alignment: int = 0
    ) -> None:
        self._name = name
        self._shape = values.shape
        self._num_axes = len(values.shape)
        self._flat = values.reshape(-1)
        self._current = current
        self._alignment = alignment or values.itemsize

    def __getitem__(self, index: Index) -> Any:
        return self._flat[self._element(index)]

    def __setitem__(self, index: Index, value: Any) -> None:
        self._flat[self._element(index)] = value

    def read_row(self, row: Any, length: int) -> np.ndarray:
        """Read the first elements of a row of an array of two axes."""
        first = self._element((row, length - 1)) - (length - 1)
        self._note_reads(first, length)
        return self._flat[first : first + length].copy()

    def write_row(self, row: Any, values: Any) -> None:
        """Write the first elements of a row of an array of two axes."""
        length = len(values)
        first = self._element((row, length - 1)) - (length - 1)
        self._note_writes(first, length)
        self._flat[first : first + length] = values

    def read_words(self, element: Any, num_words: int, *, is_fresh: bool = False) -> np.ndarray:
        """Read 4 · `num_words` bytes at an element, in one aligned access, as uint32.

        `is_fresh`: past the first cache.
        """
        first, count = self._run(element, 4 * num_words)
        self._note_reads(first, count, is_fresh)
        return self._flat[first : first + count].view(np.uint32).copy()

    def write_words(self, element: Any, words: np.ndarray) -> None:
        """Write uint32 words at an element, in one aligned access."""
        first, count = self._run(element, 4 * len(words))
        self._note_writes(first, count)
        self._flat[first : first + count] = words.view(self._flat.dtype)

    def fetch(self, element: Any, num_bytes: Any) -> None:
        """Have some bytes at an element fetched into a cache: they are not read."""
        size = int(num_bytes)
        if size <= 0 or size % FETCHED_UNIT:
            raise Misaligned(f"{self._name}: {size} bytes are fetched by {self._current()}")
        last = int(element) + (size - FETCHED_UNIT) // self._flat.itemsize
        for one in (int(element), last):
            CheckedArray._run(self, self._place(one), FETCHED_UNIT)

    def _place(self, index: Index) -> Any:
        return index

    def _note_reads(self, first: int, count: int, is_fresh: bool = False) -> None:
        pass

    def _note_writes(self, first: int, count: int) -> None:
        pass

    def _element(self, index: Index) -> int:
        """Return the flat index. Raises OutOfBounds."""
        # Most of a simulation's time goes by here: the usual forms of a good index come first.
        try:
            if type(index) is not tuple:
                element = as_integer(index)
                if self._num_axes == 1 and 0 <= element < self._shape[0]:
                    return element
            elif len(index) == 2 == self._num_axes:
                row, column = index
                row, column = as_integer(row), as_integer(column)
                num_rows, num_columns = self._shape
                if 0 <= row < num_rows and 0 <= column < num_columns:
                    return row * num_columns + column
        except TypeError:  # no integer: refused below, with its name
            pass
        return self._any_element(index)

    def _any_element(self, index: Index) -> int:
        indices = index if type(index) is tuple else (index,)
        if len(indices) != len(self._shape):
            raise Unsupported(f"{self._name}: {len(indices)} indices for {len(self._shape)} axes")
        element = 0
        for one, size in zip(indices, self._shape, strict=True):
            if not isinstance(one, (int, np.integer)):
                raise Unsupported(f"{self._name}: index {one!r} is not an integer")
            if not 0 <= one < size:
                shown = ", ".join(str(int(i)) for i in indices)
                message = f"{self._name}[{shown}] of shape {self._shape} by {self._current()}"
                raise OutOfBounds(message)
            element = element * size + int(one)
        return element

    def _run(self, element: Any, num_bytes: int) -> tuple[int, int]:
        """Return first element and number of elements of one wide access."""
        if not isinstance(element, (int, np.integer)):
            raise Unsupported(f"{self._name}: index {element!r} is not an integer")
        first, count = int(element), num_bytes // self._flat.itemsize
        if first < 0 or first + count > self._flat.size:
            where = f"{self._name}[{first}], {num_bytes} bytes by {self._current()}"
            raise OutOfBounds(f"{where}, of {self._flat.size} elements")
        if (first * self._flat.itemsize) % num_bytes or self._alignment % num_bytes:
            where = f"{self._name}[{first}], {num_bytes} bytes by {self._current()}"
            raise Misaligned(f"{where}, of memory aligned to {self._alignment} bytes")
        return first, count


class SharedArray(CheckedArray):
    """Memory that several threads touch: global memory, or the shared memory of a block."""

    def __init__(
        self, name: str, values: np.ndarray, current: Callable[[], Thread], alignment: int = 0
    ) -> None:
        super().__init__(name, values, current, alignment)
        self._writes: dict[int, Access] = {}
        self._reads: dict[int, dict[Thread, Access]] = {}
        self._atomics: dict[int, dict[Thread, Access]] = {}
        self._released: dict[int, Knowledge] = {}  # by atomic instructions on an element
        self._copies: dict[int, Thread] = {}  # elements an asynchronous copy is writing

    def __getitem__(self, index: Index) -> Any:
        element = self._element(index)
        self._note_reads(element, 1)
        return self._flat[element]

    def __setitem__(self, index: Index, value: Any) -> None:
        element = self._element(index)
        self._note_writes(element, 1)
        self._flat[element] = value

    def add_atomically(self, index: Index, value: Any) -> Any:
        """Add to an element; return what it held. Atomic accesses do not race with each other."""
        element = self._element(index)
        self._note_atomic(element)
        before = self._flat[element]
        self._flat[element] += value
        return before

    def exchange_atomically(self, index: Index, value: Any) -> Any:
        """Write an element; return what it held. Atomic accesses do not race with each other."""
        element = self._element(index)
        self._note_atomic(element)
        before = self._flat[element]
        self._flat[element] = value
        return before

    def take_ticket(self, index: Index, last: Any) -> Any:
        """Add one to an element, or set it to 0 if it is `last` or above; return what it held."""
        element = self._element(index)
        self._note_atomic(element)
        before = self._flat[element]
        self._flat[element] = 0 if before >= last else before + 1
        return before

    def _note_atomic(self, element: int) -> None:
        thread = self._current()
        self._refuse_copy(element, thread, "added to")
        self._refuse_race(self._writes.get(element), thread, "added to", "written", element)
        for read in self._reads.get(element, {}).values():
            self._refuse_race(read, thread, "added to", "read", element)
        self._atomics.setdefault(element, {})[thread] = Access.now(thread)
        released = self._released.get(element, {})
        thread.seen = everything_known((thread.seen, released))
        self._released[element] = everything_known((released, thread.released))

    def start_copy(self, element: Any, words: np.ndarray) -> Callable[[], None]:
        """Start writing words behind the thread's back; return what lands them.

        Until then the elements hold garbage.
        """
        first, count = self._run(element, 4 * len(words))
        thread = self._current()
        self._note_writes(first, count)
        for i in range(first, first + count):
            self._copies[i] = thread
        run = slice(first, first + count)
        self._flat[run] = poisoned(count, self._flat.dtype)

        def land() -> None:
            self._flat[run] = words.view(self._flat.dtype)
            access = Access.now(thread)
            for i in range(first, first + count):
                self._writes[i] = access
                del self._copies[i]

        return land

    def _note_reads(self, first: int, count: int, is_fresh: bool = False) -> None:
        thread = self._current()
        access = Access.now(thread)
        reads, written = self._reads, self._writes
        for element in range(first, first + count):
            if element in self._copies:
                self._refuse_copy(element, thread, "read")
            earlier = written.get(element)
            if earlier is not None and earlier.thread is not thread:
                self._refuse_race(earlier, thread, "read", "written", element)
                if not is_fresh and earlier.thread.block is not thread.block:
                    raise Race(
                        f"{self._name}[{self._shown(element)}] is read by {thread} where the first "
                        f"cache may hold what was there before it was written by {earlier.thread}"
                    )
            if self._atomics:
                for added in self._atomics.get(element, {}).values():
                    self._refuse_race(added, thread, "read", "added to", element)
            readers = reads.get(element)
            if readers is None:
                reads[element] = {thread: access}
            else:
                readers[thread] = access

    def _note_writes(self, first: int, count: int) -> None:
        thread = self._current()
        access = Access.now(thread)
        for element in range(first, first + count):
            if element in self._copies:
                self._refuse_copy(element, thread, "written")
            earlier = self._writes.get(element)
            if earlier is not None and earlier.thread is not thread:
                self._refuse_race(earlier, thread, "written", "written", element)
            if element in self._reads:
                for read in self._reads.pop(element).values():
                    self._refuse_race(read, thread, "written", "read", element)
            if self._atomics:
                for added in self._atomics.pop(element, {}).values():
                    self._refuse_race(added, thread, "written", "added to", element)
            self._writes[element] = access

    def _refuse_copy(self, element: int, thread: Thread, now: str) -> None:
        copier = self._copies.get(element)
        if copier is not None:
            raise Race(
                f"{self._name}[{self._shown(element)}] is {now} by {thread} while a copy started "
                f"by {copier} is under way"
            )

    def _refuse_race(
        self, earlier: Access | None, thread: Thread, now: str, before: str, element: int
    ) -> None:
        if earlier is None or earlier.is_before(thread):
            return
        raise Race(
            f"{self._name}[{self._shown(element)}] is {now} by {thread}, with no barrier since it "
            f"was {before} by {earlier.thread}"
        )

    def _shown(self, element: int) -> str:
        return ", ".join(str(int(i)) for i in np.unravel_index(element, self._shape))


@dataclass(frozen=True, slots=True)
class Spread:
    """Global memory too large for a test: what the kernel touches of it, in equal pieces.

    `values` holds the pieces one behind the other; piece i begins at element `starts[i]`. To touch
    anything else is out of bounds.
    """

    values: np.ndarray
    starts: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self.values.dtype

    def copy(self) -> Spread:
        """Return the same with values of its own."""
        return Spread(self.values.copy(), self.starts)


class SpreadArray(SharedArray):
    """A `Spread` in one launch."""

    def __init__(self, name: str, spread: Spread, current: Callable[[], Thread]) -> None:
        super().__init__(name, spread.values.reshape(-1), current, GLOBAL_ALIGNMENT)
        self._starts = spread.starts
        self._piece = spread.values.size // len(spread.starts)

    def _element(self, index: Index) -> int:
        return super()._element(self._place(index))

    def _run(self, element: Any, num_bytes: int) -> tuple[int, int]:
        return super()._run(self._place(element), num_bytes)

    def _place(self, index: Index) -> int:
        for i, start in enumerate(self._starts):
            if 0 <= int(index) - start < self._piece:
                return i * self._piece + int(index) - start
        raise OutOfBounds(f"{self._name}[{index}] by {self._current()}, outside of all pieces")


class ReadOnlyArray(CheckedArray):
    """Global memory that the kernel may not write, so that reads need no bookkeeping."""

    def __setitem__(self, index: Index, value: Any) -> None:
        self._note_writes(self._element(index), 1)

    def _note_writes(self, _first: int, _count: int) -> None:
        raise Unsupported(f"{self._name} was given as read-only and is written")


def awaited(array: CheckedArray) -> CheckedArray:
    """Return an array of a launch that begins early: only threads that have waited may touch it."""
    kind = type(array)
    made = _AWAITED.get(kind)
    if made is None:
        made = _AWAITED[kind] = type(f"Awaited{kind.__name__}", (_Awaited, kind), {})
    array.__class__ = made
    return array


class _Awaited(CheckedArray):
    def _element(self, index: Index) -> int:
        self._refuse_early()
        return super()._element(index)

    def _run(self, element: Any, num_bytes: int) -> tuple[int, int]:
        self._refuse_early()
        return super()._run(element, num_bytes)

    def _refuse_early(self) -> None:
        thread = self._current()
        if not thread.has_waited:
            raise TooEarly(f"{self._name} is touched by {thread}, which has not waited")


_AWAITED: dict[type, type] = {}


def poisoned(shape: Index, dtype: np.dtype) -> np.ndarray:
    """Return memory as a kernel finds it: whatever was there before, here the worst of it.

    NaN in floats; in unsigned 16-bit words the bits that are NaN in either 16-bit float.
    """
    if dtype.kind == "f":
        return np.full(shape, np.nan, dtype)
    if dtype == np.uint16:
        return np.full(shape, 0x7FFF, dtype)
    return np.full(shape, np.iinfo(dtype).max // 3 * 2, dtype)
