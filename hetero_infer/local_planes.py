"""Planes on this machine, behind unix sockets in a directory that only this user can enter."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hetero_infer.child_log import readable
from hetero_infer.config import EngineConfig, child_environment
from hetero_infer.left_directories import PREFIX, own, remove_left_behind
from hetero_infer.plane_process import PlaneProcess
from planes.address import MAX_UNIX_PATH_BYTES, Address
from planes.errors import ConfigError

LONGEST_NAME = "/compute.sock"

ConfigT = TypeVar("ConfigT", bound=EngineConfig)


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory for sockets, mode 0700, and remove it at the end.

    Those of processes that were killed are removed too. Raises ConfigError where the directory for
    temporary files cannot hold it.
    """
    try:
        directory = _new_directory(None)
        if len((str(directory) + LONGEST_NAME).encode()) > MAX_UNIX_PATH_BYTES:
            directory.rmdir()
            directory = _new_directory("/tmp")
        owned = own(directory)
    except OSError as error:
        raise ConfigError(
            f"no directory for temporary files can be made: {error.filename}: {error.strerror}"
        ) from None
    try:
        yield directory
    finally:
        # A plane that is just ending may still touch it.
        shutil.rmtree(directory, ignore_errors=True)
        os.close(owned)


def _new_directory(parent: str | None) -> Path:
    """Make a directory below `parent`, None: where temporary files belong."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    remove_left_behind(directory.parent)
    return directory


def compute_socket(directory: Path) -> Address:
    """Return where a compute plane in that directory listens."""
    return Address(path=str(directory / "compute.sock"))


def control_socket(directory: Path) -> Address:
    """Return where a control plane in that directory listens."""
    return Address(path=str(directory / "control.sock"))


def start_compute_plane(
    config: EngineConfig, listen: Address, on_output: Callable[[str], None] | None = None
) -> PlaneProcess:
    """Start a compute plane; it is not ready yet when this returns.

    `on_output`: gets its lines, see `PlaneProcess`; those of its log as people read them, unless
    the configuration asks for a format.
    """
    if listen.path is not None:
        Path(listen.path).unlink(missing_ok=True)  # left by one that was killed
    return PlaneProcess(
        "compute_plane",
        _for_reader(config, on_output).compute_plane_flags(listen),
        environ=child_environment(*_import_paths(config.executor)),
        on_output=on_output,
        readable=_reader(config),
    )


def start_control_plane(
    config: EngineConfig,
    compute: Address | str,
    *listen_flags: str,
    on_output: Callable[[str], None] | None = None,
) -> PlaneProcess:
    """Start a control plane; it is not ready yet when this returns. `on_output`: as above."""
    return PlaneProcess(
        "control_plane",
        _for_reader(config, on_output).control_plane_flags(compute, *listen_flags),
        environ=child_environment(*_import_paths(config.scheduler, config.kv_cache_manager)),
        on_output=on_output,
        readable=_reader(config),
    )


def _for_reader(config: ConfigT, on_output: Callable[[str], None] | None) -> ConfigT:
    """Let a plane write its log so that this process can tell it from what else it prints."""
    if on_output is None or config.log_format != "auto":
        return config
    return dataclasses.replace(config, log_format="json")


def _reader(config: EngineConfig) -> Callable[[str], str | None]:
    """Return what recognises log lines; nothing does where the caller chose their format."""
    return readable if config.log_format == "auto" else lambda _: None


def _import_paths(*names: str | None) -> list[str]:
    """Return where a user's own parts are looked for, behind everything installed: here too."""
    is_own = any(name is not None and ":" in name for name in names)
    return [str(Path.cwd())] if is_own else []
