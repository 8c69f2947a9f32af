"""A file that is written in pieces of a limited size, to be put together again by `cat`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Pieces(io.RawIOBase):
    """A file for writing, named NAME.000, NAME.001, … of `limit` bytes each; None: one piece.

    Its pieces, put together in the order of their names, are what was written.
    """

    def __init__(self, name: Path, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"a piece must have a byte at least, not {limit}")
        self.paths: list[Path] = []
        self._name = name
        self._limit = limit
        self._left: int | None = 0
        self._file: BinaryIO | None = None

    def writable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the last piece."""
        if self._file is not None:
            self._file.close()
        super().close()

    def write(self, content: Buffer) -> int:
        """Write behind what was written."""
        rest = memoryview(content)
        size = len(rest)
        while rest:
            file = self._open()
            count = len(rest) if self._left is None else min(self._left, len(rest))
            file.write(rest[:count])
            rest = rest[count:]
            if self._left is not None:
                self._left -= count
        return size

    def _open(self) -> BinaryIO:
        """Return the piece that has room."""
        if self._file is not None and self._left != 0:
            return self._file
        if self._file is not None:
            self._file.close()
        self.paths.append(self._name.with_name(f"{self._name.name}.{len(self.paths):03}"))
        self._file = self.paths[-1].open("wb")
        self._left = self._limit
        return self._file
