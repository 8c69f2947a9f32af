"""`hetero-infer serve`: both planes until SIGTERM, the compute plane started again when it dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import NoReturn, Self

from hetero_infer.config import ServeConfig
from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.plane_process import (
    STOP_GRACE_S,
    PlaneProcess,
    PlaneStartError,
    describe_exit,
    wait_all_ready,
)
from planes.address import Address
from planes.errors import ExecutionError

MAX_RESTARTS = 5
"""In a row, each before the plane had run `STEADY_S`; then something is wrong that stays wrong."""

STEADY_S = 60.0
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 8.0

HURRY_AFTER_S = 1.0
"""Signals closer to the first than this say no more than the first."""

EXIT_CONFIG = 2
"""A plane that ends with this will not do better the next time."""


class StopServing(BaseException):
    """SIGTERM or SIGINT came."""


def serve(config: ServeConfig) -> int:
    """Run the planes until a signal comes; the exit status.

    Raises EngineError if a plane cannot be started, or ends and cannot be kept alive.
    """
    config.validate()
    with _StopSignals() as signals, private_directory() as directory:
        planes = ServedPlanes(config, directory)
        try:
            signals.arm(directory)
            planes.start()
            planes.watch()
        except StopServing:
            return 0 if planes.stop() else 1
        finally:
            signals.disarm()
            planes.stop()


class _StopSignals:
    """Turns the first SIGTERM or SIGINT into StopServing, once armed.

    Those that follow within `HURRY_AFTER_S` are taken for the same wish. A later one ends the
    process at once; the planes end with it, because their lifelines close.
    """

    def __init__(self) -> None:
        self._is_armed = False
        self._directory: Path | None = None
        self._came_at: float | None = None

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self, directory: Path) -> None:
        """From here on a signal raises StopServing, and so does one that came before."""
        self._directory = directory
        self._is_armed = True
        if self._came_at is not None:
            raise StopServing

    def disarm(self) -> None:
        """From here on no signal interrupts the clean-up."""
        self._is_armed = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is None:
            self._came_at = now
            if self._is_armed:
                raise StopServing
        elif now - self._came_at >= HURRY_AFTER_S:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class ServedPlanes:
    """The child processes of one `serve`."""

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._compute: PlaneProcess | None = None
        self._control: PlaneProcess | None = None
        self._compute_began = 0.0
        self._num_restarts = 0
        self._ended: SimpleQueue[PlaneProcess] = SimpleQueue()

    @property
    def _compute_address(self) -> Address:
        return self._config.compute_address or compute_socket(self._directory)

    def start(self) -> None:
        """Start what is to run here, and say where it serves once it does."""
        planes = []
        if self._config.compute is None:
            planes.append(self._start_compute())
        self._control = start_control_plane(
            self._config, self._compute_address, *self._config.listen_flags()
        )
        self._report_end(self._control)
        wait_all_ready([*planes, self._control])
        sys.stdout.write(
            f"Serving gRPC on {self._control.address} "
            f"(control plane: pid {self._control.pid}; compute plane: "
            + (f"pid {self._compute.pid} at " if self._compute is not None else "")
            + f"{self._compute_address})\n"
        )
        sys.stdout.flush()

    def watch(self) -> NoReturn:
        """Keep the planes alive, until an exception ends it."""
        while True:
            plane = self._ended.get()
            self._check_control(plane)
            if plane is self._compute:
                self._restart_compute(plane)

    def stop(self) -> bool:
        """End the control plane, which lets its requests finish, then the compute plane.

        Returns whether both left as they should.
        """
        statuses = []
        if self._control is not None:
            statuses.append(self._control.stop(self._config.shutdown_timeout + STOP_GRACE_S))
        if self._compute is not None:
            statuses.append(self._compute.stop())
        # A plane that had not set up its signals yet ends by the signal itself.
        return all(status in (0, -signal.SIGTERM) for status in statuses)

    def _start_compute(self) -> PlaneProcess:
        self._compute = start_compute_plane(self._config, self._compute_address)
        self._compute_began = time.monotonic()
        self._report_end(self._compute)
        return self._compute

    def _restart_compute(self, dead: PlaneProcess) -> None:
        """Start another compute plane; the control plane finds it by itself. Raises EngineError."""
        how = describe_exit(dead.stop())
        if time.monotonic() - self._compute_began >= STEADY_S:
            self._num_restarts = 0
        while True:
            if self._num_restarts >= MAX_RESTARTS:
                raise ExecutionError(
                    f"the compute plane {how}; {MAX_RESTARTS} restarts did not help"
                )
            pause_s = min(FIRST_PAUSE_S * 2**self._num_restarts, MAX_PAUSE_S)
            self._num_restarts += 1
            sys.stderr.write(f"hetero-infer: the compute plane {how}; starting another one\n")
            sys.stderr.flush()
            self._pause(pause_s)
            try:
                started = self._start_compute()
                started.wait_ready()
            except PlaneStartError as error:
                if error.exit_status == EXIT_CONFIG:
                    raise
                how = describe_exit(error.exit_status)
                continue
            sys.stderr.write(f"hetero-infer: compute plane: pid {started.pid}\n")
            sys.stderr.flush()
            return

    def _pause(self, seconds: float) -> None:
        """Wait; the control plane must not end meanwhile. Raises ExecutionError if it does."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while True:
                plane = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
                self._check_control(plane)

    def _check_control(self, ended: PlaneProcess) -> None:
        if ended is self._control:
            raise ExecutionError(f"the control plane {describe_exit(ended.process.returncode)}")

    def _report_end(self, plane: PlaneProcess) -> None:
        """Put the plane into the queue of the ended when it ends."""

        def wait() -> None:
            plane.process.wait()
            self._ended.put(plane)

        threading.Thread(target=wait, name=f"wait-{plane.pid}", daemon=True).start()
