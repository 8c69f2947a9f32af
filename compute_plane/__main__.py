"""`python -m compute_plane`: one compute plane, until SIGTERM, SIGINT or the end of its parent.

Exit status: 0 after a requested stop, 2 for what the user can put right (configuration, model
files, address), 1 for a fault.
"""

from __future__ import annotations

import planes.lean_structlog  # noqa: F401 - before anything imports structlog

# isort: split
import contextlib
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Final

import structlog

from compute_plane.app import ComputePlane
from compute_plane.config import ComputePlaneConfig, load_config, service_manager
from planes.errors import ConfigError, EngineError
from planes.hang_up import has_terminal
from planes.logs import configure_logging
from planes.ready import announce_failure, announce_ready, watch_lifeline

EXIT_OK: Final = 0
EXIT_FAULT: Final = 1
EXIT_CONFIG: Final = 2

SIGNAL_PAUSE_S: Final = 0.5

log = structlog.get_logger()


def main(argv: Sequence[str] | None = None, *, prog: str = "compute_plane") -> int:
    """Run a compute plane; return its exit status. `argv` is without the program's name."""
    try:
        loaded = load_config(sys.argv[1:] if argv is None else argv, prog=prog)
        configure_logging(
            plane="compute", level=loaded.config.log_level, log_format=loaded.config.log_format
        )
        for key in loaded.unknown_keys:
            log.warning("unknown key in the config file", key=key)
        for line in loaded.unknown_variables:
            log.warning(line)
        return _Process(loaded.config).run()
    except EngineError as error:
        print(f"{prog}: {_in_words(error)}\n", end="", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAULT
    except MemoryError as error:
        print(f"{prog}: {_in_words(error)}\n", end="", file=sys.stderr)
        return EXIT_FAULT


def _in_words(error: EngineError | MemoryError) -> str:
    """Say it on one line."""
    if isinstance(error, EngineError):
        return " ".join(error.message.split())
    return f"out of memory: {error}"


class _StopRequested(BaseException):
    """A signal came while the plane was still loading; not to be caught by `except Exception`."""


class _Process:
    """The plane as a process: its signals and its end."""

    def __init__(self, config: ComputePlaneConfig) -> None:
        self._config = config
        # A signal handler may put at any moment. An event it may not set: who waits for one holds
        # its lock for moments, and the handler, in the same thread, would wait for that for good.
        self._reasons: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._has_failed = False
        self._is_loading = True

    def run(self) -> int:
        """Load, serve, wait for a reason to stop, stop."""
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            signal.signal(signal.SIGHUP, self._on_signal if has_terminal() else signal.SIG_IGN)
            # A parent that is gone is the same as its asking to stop.
            watch_lifeline(self._config.lifeline_fd, lambda: os.kill(os.getpid(), signal.SIGTERM))
            plane = ComputePlane(self._config, on_fault=self._on_fault)
            self._is_loading = False
            address = plane.start()
        except _StopRequested:
            return EXIT_OK
        except (EngineError, MemoryError) as error:
            announce_failure(self._config.ready_fd, _in_words(error))
            raise
        manager = service_manager()
        # What is alive now stays: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        ends = threading.Event()
        try:
            announce_ready(self._config.ready_fd, str(address))
            manager.ready(f"serving on {address}")
            manager.feed_watchdog(lambda: plane.is_well(manager.watchdog_s or 0.0), ends)
            self._wait_for_a_reason()
        finally:
            ends.set()
            manager.stopping()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
            is_done = plane.stop()
        return EXIT_OK if is_done and not self._has_failed else EXIT_FAULT

    def _wait_for_a_reason(self) -> None:
        """Return when the plane is to stop."""
        while True:
            # A signal that another thread takes, as right after SIGCONT, does not end this wait.
            with contextlib.suppress(queue.Empty):
                return self._reasons.get(timeout=SIGNAL_PAUSE_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - its shape
        # Also while loading: code that swallows exceptions may get this one.
        self._reasons.put(None)
        if self._is_loading:
            # What is half made (by a compiler, say) may fail once more when it is deleted.
            sys.unraisablehook = lambda _: None
            raise _StopRequested

    def _on_fault(self) -> None:
        self._has_failed = True
        self._reasons.put(None)


if __name__ == "__main__":
    sys.exit(main())
