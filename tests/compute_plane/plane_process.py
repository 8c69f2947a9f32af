"""A compute plane as a real process, started as its users start it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

TIMEOUT_S = 30.0
COMPILE_TIMEOUT_S = 300.0
SIMULATED = ("--executor=simulated", "--max-num-blocks=16", "--log-level=error")


class Process:
    """A compute plane started as its users start it; `ready` waits for the announcement."""

    def __init__(self, *flags: str, umask: int = -1) -> None:
        self._ready, ready_write = os.pipe()
        lifeline_read, self.lifeline = os.pipe()
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "compute_plane", *flags),
                f"--ready-fd={ready_write}",
                f"--lifeline-fd={lifeline_read}",
            ],
            pass_fds=(ready_write, lifeline_read),
            umask=umask,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(ready_write)
        os.close(lifeline_read)

    def ready(self) -> str:
        assert select.select([self._ready], [], [], COMPILE_TIMEOUT_S)[0], "not ready in time"
        with os.fdopen(self._ready) as pipe:
            word, address = pipe.readline().split()
        assert word == "READY"
        return address

    def end(self) -> tuple[int, str]:
        """Wait for the process; its exit status and stderr."""
        _, errors = self.popen.communicate(timeout=TIMEOUT_S)
        return self.popen.returncode, errors

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.lifeline)
        self.popen.kill()
        self.popen.communicate()


@contextlib.contextmanager
def process(*flags: str, umask: int = -1) -> Iterator[Process]:
    started = Process(*flags, umask=umask)
    try:
        yield started
    finally:
        started.close()


def run_to_end(*flags: str) -> tuple[int, list[str]]:
    """Start a plane that cannot start; its exit status and the lines it printed."""
    with process(*flags) as started:
        status, errors = started.end()
    return status, errors.splitlines()
