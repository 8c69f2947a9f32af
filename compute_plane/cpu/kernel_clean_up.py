"""Kernels that nobody uses any more: each version and each processor has a directory of its own.

Planes of several containers may share the directories of one home. Each holds a shared lock on the
one it uses, as long as it lives, and dates it when it starts; who removes one holds it alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

UNUSED_S: Final = 30 * 24 * 3600.0
"""No start has used a directory for so long: it goes."""
HALF_WRITTEN_S: Final = 24 * 3600.0
"""A file that is being written is complete within milliseconds."""

_DIRECTORY: Final = re.compile("[0-9a-f]{16}")
_KERNEL: Final = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+\.o")
_HALF_WRITTEN: Final = re.compile(r"\.[a-z0-9_]+\.[a-z0-9_]+\.[0-9a-f]{16}")
_MOST_SEEN: Final = 10_000
_MOST_REMOVED: Final = 32
"""Directories in one start, which must not take long."""
_TURNS: Final = 100
_PAUSE_S: Final = 0.01

_in_use: Final[dict[Path, int]] = {}
"""Descriptors that hold this process's locks."""


def use(directory: Path, make: Callable[[Path], None]) -> None:
    """Keep a directory from being removed while this process lives.

    `make` makes it, if it is not there; it is called first. Where the file system has no locks its
    date must do, which is renewed.
    """
    for _ in range(_TURNS):
        make(directory)
        try:
            held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed just now, or not to be read: who looks for kernels will say so
            continue
        is_locked = _lock(held, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            os.utime(held)
        if is_locked and _is_there(directory, held):
            before, _in_use[directory] = _in_use.get(directory), held
            if before is not None:
                os.close(before)
            return
        os.close(held)
        if is_locked is None:
            return
        time.sleep(_PAUSE_S)  # somebody is removing it


def remove_unused(root: Path, used: Path) -> int:
    """Remove directories below `root` that nobody has used for long, and torn files of `used`.

    Only files that kernels are kept in are removed, and directories that are empty then; what
    cannot be removed stays. Returns how many directories went.
    """
    num_removed = 0
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in itertools.islice(entries, _MOST_SEEN):
            if _DIRECTORY.fullmatch(entry.name) and entry.name != used.name:
                with contextlib.suppress(OSError):
                    num_removed += _remove(Path(entry.path))
            if num_removed == _MOST_REMOVED:
                break
    with contextlib.suppress(OSError), os.scandir(used) as entries:
        for entry in itertools.islice(entries, _MOST_SEEN):
            if _HALF_WRITTEN.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if _is_own_file(status) and status.st_mtime < time.time() - HALF_WRITTEN_S:
                        os.unlink(entry.path)
    return num_removed


def _remove(directory: Path) -> bool:
    """Remove a directory if nobody uses it; whether it is gone. Raises OSError."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Its date twice: who dates it between has locked it before.
        if not _is_unused(held) or not _lock(held, fcntl.LOCK_EX) or not _is_unused(held):
            return False
        for name in os.listdir(held):
            is_kernel = _KERNEL.fullmatch(name) or _HALF_WRITTEN.fullmatch(name)
            if is_kernel and _is_own_file(os.stat(name, dir_fd=held, follow_symlinks=False)):
                os.unlink(name, dir_fd=held)
        os.rmdir(directory)
        return True
    finally:
        os.close(held)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Take a lock without waiting; False: others have it, None: there are no locks here."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(directory: Path, descriptor: int) -> bool:
    """Whether an open directory has not been removed meanwhile."""
    try:
        return os.path.samestat(os.stat(directory), os.fstat(descriptor))
    except OSError:
        return False


def _is_unused(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and status.st_mtime < time.time() - UNUSED_S


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
