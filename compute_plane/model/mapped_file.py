"""Read-only mapping of a model file."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from compute_plane.model.errors import ModelFileError, system_fault


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file that is not empty. Raises ModelFileError naming it and the fault.

    The file must not be cut short while it is mapped: the system then ends the process.
    """
    try:
        # A pipe would block right in open(2) without the flag.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(path, system_fault(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(path, "not a regular file")
        if not status.st_size:
            raise ModelFileError(path, "the file is empty")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, system_fault(error)) from None
    finally:
        os.close(descriptor)
