"""Directories for sockets whose owner was killed before it could remove them.

Who makes one holds a lock on a file in it as long as it lives, however it ends. Process ids would
not do: containers that share a directory for temporary files count their processes apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
from pathlib import Path
from typing import Final

PREFIX: Final = "hetero-"
LOCK: Final = "owner.lock"

_NAME: Final = re.compile(re.escape(PREFIX) + "[a-z0-9_]{8}")
"""As `tempfile.mkdtemp` makes them of the prefix."""
_NOT_YET: Final = 0o200
_LOCKED: Final = 0o600
"""Modes of the lock's file, before and since its owner has locked it."""
_MOST_SEEN: Final = 10_000
"""Entries looked at: a start must not wait for a directory that others have filled."""


def own(directory: Path) -> int:
    """Mark a new directory as this process's; return the descriptor that holds the mark.

    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    lock = os.open(directory / LOCK, flags, _NOT_YET)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.fchmod(lock, _LOCKED)  # which takes no room on a disk that may be full
    except OSError:
        os.close(lock)
        raise
    return lock


def remove_left_behind(parent: Path) -> None:
    """Remove the directories below `parent` that this user's dead processes have left there.

    Only sockets and the lock are removed, and what is empty then. What cannot be removed stays.
    """
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in itertools.islice(entries, _MOST_SEEN):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove(entry.path)


def _remove(path: str) -> None:
    """Remove one directory if it is ours and its owner is dead. Raises OSError."""
    with contextlib.ExitStack() as descriptors:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        descriptors.callback(os.close, directory)
        if os.fstat(directory).st_uid != os.geteuid():
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = os.open(LOCK, flags, dir_fd=directory)
        descriptors.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_IMODE(os.fstat(lock).st_mode) != _LOCKED:  # its owner is about to lock it
            return
        for name in os.listdir(directory):
            if stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=directory)
        if os.listdir(directory) == [LOCK]:
            os.unlink(LOCK, dir_fd=directory)
            os.rmdir(path)
