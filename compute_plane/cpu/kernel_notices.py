"""What a start says of kernels that it has to compile."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from planes.errors import ConfigError

log = structlog.get_logger()


class KernelNotices:
    """Logs what is compiled because it was not kept; a `kernels.cpu.machine_code.Watch`.

    Warnings, because a start that takes half a minute must say why on any terminal.
    """

    def __init__(self) -> None:
        self._num_made = 0
        self._began = self._ended = 0.0
        self._is_told = False
        self._is_failure_told = False

    def missing(self, name: str, directory: Path | None) -> None:  # noqa: ARG002 - its shape
        """Say, before the first one, that something is compiled."""
        if not self._is_told:
            self._is_told = True
            self._began = time.monotonic()
            _tell_start(directory)

    def made(self, name: str) -> None:
        """Say which kernel it was."""
        self._ended = time.monotonic()
        self._num_made += 1
        log.info("compiled", kernel=name)

    def not_kept(self, error: ConfigError) -> None:
        """Say, once, that the next start will compile them again."""
        if not self._is_failure_told:
            self._is_failure_told = True
            log.warning(
                "compiled kernels cannot be kept: later starts compile them again",
                reason=error.message,
            )

    def sum_up(self) -> None:
        """Say how many were compiled, if any were; what is compiled later is a new beginning."""
        if self._num_made:
            seconds = round(self._ended - self._began, 1)
            log.warning("compiled kernels", kernels=self._num_made, seconds=seconds)
        self._num_made, self._is_told = 0, False


def _tell_start(directory: Path | None) -> None:
    if directory is None:
        log.warning("compiling kernels, which takes about half a minute")
    elif any(directory.iterdir()):
        log.warning(
            "compiling kernels that no earlier start needed; later starts find them",
            directory=str(directory),
        )
    else:
        log.warning(
            "compiling kernels, once, in about half a minute; later starts find them",
            directory=str(directory),
        )
