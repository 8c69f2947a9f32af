"""The file of the unix socket that a gRPC server serves at, and what becomes of it at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from planes.address import Address


class SocketFile:
    """Made once the server is bound to `address`; does nothing for one that is no unix socket."""

    def __init__(self, address: Address) -> None:
        self._path = address.path
        self._inode = None if self._path is None else _inode(self._path)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """While the server is stopped: its file is removed, another server's stays.

        Ours may have been removed, and another server have been started there since. gRPC, when it
        ends, removes whatever lies at its path.
        """
        path = self._path
        if path is None:
            yield
            return
        aside = f"{path}.{os.getpid()}"
        if _inode(path) not in (None, self._inode):
            with contextlib.suppress(OSError):
                os.link(path, aside)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if _inode(path) is None:
                    os.rename(aside, path)
                elif _inode(path) == self._inode:
                    os.unlink(path)
                else:
                    os.unlink(aside)


def _inode(path: str) -> int | None:
    """Return the number of what lies there; None: nothing does."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None
