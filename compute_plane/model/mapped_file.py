"""Opening and mapping of model files, which must be regular ones."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import BinaryIO

from compute_plane.model.errors import ModelFileError, system_fault


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises ModelFileError naming it and the fault."""
    try:
        # A pipe would block right in open(2) without the flag.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(path, system_fault(error)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelFileError(path, "not a regular file")
    return os.fdopen(descriptor, "rb")


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file that is not empty. Raises ModelFileError naming it and the fault.

    The file must not be cut short while it is mapped: the system then ends the process.
    """
    with open_regular(path) as file:
        try:
            if not os.fstat(file.fileno()).st_size:
                raise ModelFileError(path, "the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(path, system_fault(error)) from None


def forget_pages(mapping: mmap.mmap) -> None:
    """Take a mapped file's pages out of this process's memory; reading maps them again."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is not None:
        mapping.madvise(advice)
