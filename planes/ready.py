"""How a plane tells its parent that it serves, and how it ends when its parent is gone.

Both are inherited pipe ends, named by number on the command line: the plane writes one line
`READY ADDRESS`, and a tab and the address of its HTTP port if it has one, to `--ready-fd` once it
serves, or `FAILED REASON` where it cannot; `--lifeline-fd` is never written, its end of file
means that the parent is dead, however it died.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from planes.errors import ConfigError

MAX_REASON_BYTES = 2048


def announce_ready(ready_fd: int | None, address: str, http_address: str | None = None) -> None:
    """Write `READY ADDRESS` and close the pipe; without a pipe do nothing."""
    if ready_fd is None:
        return
    try:
        also = "" if http_address is None else f"\t{http_address}"
        os.write(ready_fd, f"READY {address}{also}\n".encode())
        os.close(ready_fd)
    except OSError as error:
        raise ConfigError(
            f"ready_fd {ready_fd} cannot be written: {error.strerror}", field="ready_fd"
        ) from None


def announce_failure(ready_fd: int | None, reason: str) -> None:
    """Write `FAILED REASON`, of a plane that has not announced that it serves, on one line.

    Without a pipe, or a parent that listens, do nothing.
    """
    if ready_fd is None:
        return
    words = " ".join(reason.split()).encode(errors="replace")[:MAX_REASON_BYTES]
    with contextlib.suppress(OSError):
        os.write(ready_fd, b"FAILED " + words + b"\n")


def watch_lifeline(lifeline_fd: int | None, on_parent_gone: Callable[[], None]) -> None:
    """Call `on_parent_gone` on a daemon thread when the pipe closes; without a pipe do nothing."""
    if lifeline_fd is None:
        return

    def wait() -> None:
        # A read of a pipe nobody writes returns only at end of file; an unreadable descriptor
        # is a parent that never was.
        try:
            while os.read(lifeline_fd, 64):
                pass
        except OSError:
            pass
        on_parent_gone()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
