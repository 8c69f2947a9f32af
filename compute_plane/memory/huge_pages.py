"""Memory that fills the processor's address cache as little as it can: huge pages where there are.

A step of a model reads all its weights once. With pages of 4 KiB that is tens of thousands of
address translations a step; with pages of 2 MiB some dozens.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

from planes.errors import MemoryError as OutOfMemoryError

UInt8Array = npt.NDArray[np.uint8]

HUGE_PAGE_BYTES: Final = 2 << 20


def huge_page_array(num_bytes: int, *, purpose: str) -> UInt8Array:
    """Return zeroed uint8 memory [num_bytes], aligned to 2 MiB, in huge pages if the system agrees.

    A page takes memory only once it is touched; memory in use is rounded up to whole pages, so
    small things should share an array. The memory goes back to the system with the last
    array that refers to it. `purpose` is what the memory is for, in words, for the message.
    Raises the family's MemoryError if the system does not give the address space.
    """
    # Whole pages, so that the last one can be huge too, and room to begin at a multiple of one.
    num_pages = max(1, -(-num_bytes // HUGE_PAGE_BYTES))
    reserved = (num_pages + 1) * HUGE_PAGE_BYTES - mmap.PAGESIZE
    try:
        # Private: anonymous memory is shared by default, and shared memory has no huge pages.
        mapping = mmap.mmap(-1, reserved, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise OutOfMemoryError(f"{num_bytes} bytes for {purpose} are not to be had") from None
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # A system built without huge pages refuses: the memory is as good, only slower.
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    whole = np.frombuffer(mapping, np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[first : first + num_bytes]


class HugePageArena:
    """Arrays that share huge pages: many small ones take few, and big ones only what is touched.

    `purpose`: as for `huge_page_array`. The memory lives as long as the arena or one of its arrays.
    """

    REGION_BYTES: Final = 64 << 20
    """Address space taken at a time; it costs nothing before it is touched."""
    ALIGNMENT: Final = 64

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._region: UInt8Array = np.zeros(0, np.uint8)
        self._kept: list[UInt8Array] = []
        self._taken = 0

    def take(self, num_bytes: int) -> UInt8Array:
        """Return zeroed uint8 memory [num_bytes], aligned to 64 bytes, that nobody else has."""
        first = self._taken
        if first + num_bytes > len(self._region):
            self._region = huge_page_array(max(num_bytes, self.REGION_BYTES), purpose=self._purpose)
            self._kept.append(self._region)
            first = 0
        self._taken = -(-(first + num_bytes) // self.ALIGNMENT) * self.ALIGNMENT
        return self._region[first : first + num_bytes]
