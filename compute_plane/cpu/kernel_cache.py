"""Where the machine code of the CPU kernels is kept between starts.

What is found there is run, so the directory must be this user's alone. Its name carries a hash of
the kernel sources and of everything else the machine code depends on.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import stat
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import llvmlite
import llvmlite.binding
import numpy as np
import structlog

import compute_plane
import kernels
from compute_plane.cpu.kernel_clean_up import remove_unused, use
from kernels.cpu.instruction_set import forced_target, selected_instruction_set
from kernels.cpu.machine_code import Watch, keep_code_in
from planes.errors import ConfigError

PRIVATE_MODE: Final = 0o700
COMPILED_FROM: Final = ("cpu", "reference")
"""Folders of `kernels` whose code and constants end up in the machine code."""

OTHERS: Final = 0o077
"""Permission bits of group and others."""

DISK_TROUBLE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""What keeps a directory from being made though its path is right; kernels work without one."""

log = structlog.get_logger()


def prepare_kernel_cache(root: Path, watch: Watch | None = None) -> Path:
    """Let machine code be kept below `root`, and return the directory in use.

    Must be called when the instruction set is chosen, and before any operation is loaded. `root`
    and the directory are created with mode 0700; directories that nobody has used for long are
    removed. Raises ConfigError, naming the path, if one of them is not a directory of this user
    that only this user can enter, or cannot be created. A full disk, or a root that is there and
    may not be written to, is told the watch instead, if there is one: nothing is kept then.
    """
    directory = root / kernel_fingerprint()
    trouble = DISK_TROUBLE
    try:
        make_private_directory(root)
        trouble |= {errno.EACCES}
        use(directory, make_private_directory)
    except ConfigError as error:
        cause = error.__cause__
        if watch is None or not isinstance(cause, OSError) or cause.errno not in trouble:
            raise
        keep_code_in(None, watch)
        watch.not_kept(error)
        return directory
    num_removed = remove_unused(root, directory)
    if num_removed:
        log.info("removed kernels that no start has used for 30 days", directories=num_removed)
    keep_code_in(directory, watch)
    return directory


def kernel_fingerprint() -> str:
    """Return a hash of the kernel sources, the compiler and the processor compiled for.

    And of the instruction set: the same processor has AMX or not, as its system grants it.
    """
    package = Path(kernels.__file__ or "").parent
    folders = [package / folder for folder in COMPILED_FROM]
    return _fingerprint(folders, selected_instruction_set().name)


def numerics_fingerprint() -> str:
    """Return a hash of everything that decides the bits of a result, but for model and options.

    Besides what `kernel_fingerprint` covers: the executor's own sources, what it shares with
    others, and what decodes weights.
    """
    package = Path(compute_plane.__file__ or "").parent
    arithmetic = Path(kernels.__file__ or "").parent
    return _fingerprint([arithmetic, *(package / name for name in ("cpu", "executor", "model"))])


def _fingerprint(folders: Sequence[Path], *more: str) -> str:
    """Return a hash of the Python sources below folders, the compiler, the processor and more."""
    digest = hashlib.sha256()
    for folder in folders:
        for source in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{source.relative_to(folder)}\0".encode())
            digest.update(source.read_bytes())
    versions = (
        platform.python_version(), np.__version__, version("numba"), llvmlite.__version__,
    )  # fmt: skip
    target = forced_target() or (
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
    )
    digest.update("\0".join((*versions, *target, *more)).encode())
    return digest.hexdigest()[:16]


def make_private_directory(path: Path) -> None:
    """Create `path` with mode 0700, or check that it is private to this user already."""
    try:
        path.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(f"kernel cache {path}: {error.strerror}", field="kernel_cache") from error
    problem = None
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory (a symbolic link is not followed)"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & OTHERS:
        problem = f"has mode {stat.S_IMODE(status.st_mode):04o}, others may enter; it must be 0700"
    if problem is not None:
        raise ConfigError(f"kernel cache {path} {problem}", field="kernel_cache")
