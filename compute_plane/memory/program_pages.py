"""Giving back the pages of a library that was only needed to start.

Once all kernels are compiled or loaded, nobody runs the compiler any more, but half of its code
stays resident: some 50 MiB, or 31 where all kernels were only loaded. Its pages are clean copies of
the file, so they can go; should anybody call it again, the system brings back what is touched.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

MADV_DONTNEED: Final = 4
MAPS: Final = Path("/proc/self/maps")


def code_ranges(library: str, maps: str) -> list[tuple[int, int]]:
    """Return start and end of the mappings of a library's code, from the text of /proc/self/maps.

    Only code that cannot be written: other pages may hold what the loader or the library put there,
    and that would be lost.
    """
    ranges = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] == "r-xp" and library in Path(fields[5]).name:
            start, end = fields[0].split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def forget_code(library: str) -> int:
    """Give back the resident code of a loaded library; return the bytes of its mappings.

    `library`: a part of its file's name. Does nothing where the system has no such thing.
    """
    if not sys.platform.startswith("linux"):
        return 0
    try:
        maps = MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    forgotten = 0
    for start, end in code_ranges(library, maps):
        if madvise(start, end - start, MADV_DONTNEED) == 0:
            forgotten += end - start
    return forgotten
