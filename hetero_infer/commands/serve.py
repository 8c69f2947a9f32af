"""`hetero-infer serve`: both planes until SIGTERM, each started again when it dies."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

from hetero_infer.config import ServeConfig
from hetero_infer.local_planes import (
    compute_socket,
    private_directory,
    start_compute_plane,
    start_control_plane,
)
from hetero_infer.own_log import teller
from hetero_infer.plane_process import STOP_GRACE_S, PlaneProcess, wait_all_ready
from hetero_infer.supervision import Ended, SupervisedPlane, take_turn
from planes.extras import the_extra
from planes.hang_up import has_terminal

HURRY_AFTER_S = 1.0
"""Signals closer to the last one that counted than this say no more than that."""

HURRY_GRACE_S = 5.0
"""What a plane gets that is to end after a second signal."""


class StopServing(BaseException):
    """SIGTERM or SIGINT came."""


def serve(config: ServeConfig) -> int:
    """Run the planes until a signal comes; the exit status.

    0: everything ended in order. 128 + signal: a second signal cut requests off. Raises EngineError
    if a plane cannot be started, or ends and cannot be kept alive.
    """
    config.validate()
    with private_directory() as directory:
        planes = ServedPlanes(config, directory)
        with _StopSignals(planes.hurry, directory) as signals:
            try:
                signals.arm()
                planes.start()
                planes.watch()
            except StopServing:
                is_orderly = planes.stop()
                return signals.hurried_by or (0 if is_orderly else 1)
            finally:
                signals.disarm()
                planes.stop()


class _StopSignals:
    """What SIGTERM and SIGINT do: the first raises StopServing, the second calls `hurry`.

    SIGHUP does the same at a terminal, elsewhere nothing. Those that follow one within
    `HURRY_AFTER_S` are taken for the same wish. A third ends the process at once; the planes end
    with it, because their lifelines close.
    """

    def __init__(self, hurry: Callable[[], None], directory: Path) -> None:
        self._hurry = hurry
        self._directory = directory
        self._is_armed = False
        self._num_came = 0
        self._last_at = 0.0
        self.hurried_by = 0
        """128 + the signal that came second, as a shell would say it; 0: none did."""

    def __enter__(self) -> Self:
        handlers: dict[signal.Signals, Callable[..., None] | signal.Handlers] = {
            signal.SIGTERM: self._on_signal,
            signal.SIGINT: self._on_signal,
            signal.SIGHUP: self._on_signal if has_terminal() else signal.SIG_IGN,
        }
        self._before = {
            number: signal.signal(number, handler) for number, handler in handlers.items()
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From here on a signal raises StopServing, and so does one that came before."""
        self._is_armed = True
        if self._num_came:
            raise StopServing

    def disarm(self) -> None:
        """From here on no signal interrupts the clean-up."""
        self._is_armed = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._num_came and now - self._last_at < HURRY_AFTER_S:
            return
        self._num_came += 1
        self._last_at = now
        if self._num_came == 1:
            if self._is_armed:
                raise StopServing
        elif self._num_came == 2:
            self.hurried_by = 128 + number
            self._hurry()
        else:
            shutil.rmtree(self._directory, ignore_errors=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class ServedPlanes:
    """The child processes of one `serve`."""

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        self._config = config
        self._compute_address = config.compute or str(compute_socket(directory))
        self._listen_flags = config.listen_flags()
        self._ended: Ended = Ended()
        say = teller(config.log_format, config.log_level)
        self._control = SupervisedPlane(self._start_control, self._ended, say)
        self._compute = SupervisedPlane(
            lambda: start_compute_plane(config, compute_socket(directory)), self._ended, say
        )
        self._stopping: SupervisedPlane | None = None
        self._is_hurried = False

    def _start_control(self) -> PlaneProcess:
        return start_control_plane(self._config, self._compute_address, *self._listen_flags)

    def start(self) -> None:
        """Start what is to run here, and say where it serves once it does."""
        planes = []
        compute = ""
        if self._config.compute is None:
            planes.append(self._compute.start())
            compute = f"pid {planes[0].pid} at "
        control = self._control.start()
        wait_all_ready([*planes, control])
        self._keep_addresses(control)
        sys.stdout.write(
            f"Serving gRPC on {control.address} (control plane: pid {control.pid}; "
            f"compute plane: {compute}{self._compute_address})\n"
        )
        if control.http_address is not None:
            scheme = "http" if self._config.tls_cert is None else "https"
            sys.stdout.write(f"Serving HTTP on {scheme}://{control.http_address}\n")
        elif self._config.http:  # for want of nothing else: a port that is taken is an error
            sys.stdout.write(f"No HTTP without {the_extra('http')}\n")
        sys.stdout.flush()

    def _keep_addresses(self, control: PlaneProcess) -> None:
        """Let every later control plane listen where clients have found the first."""
        self._listen_flags.append(f"--listen={control.address}")  # the last of several counts
        if control.http_address is not None:
            self._listen_flags.append(f"--http-port={control.http_address.port}")

    def watch(self) -> NoReturn:
        """Keep the planes alive, until an exception ends it."""
        while True:
            take_turn((self._control, self._compute), self._ended)

    def stop(self) -> bool:
        """End the control plane, which lets its requests finish, then the compute plane.

        Returns whether both left as they should.
        """
        statuses = []
        for plane, grace_s in (
            (self._control, self._config.shutdown_timeout + STOP_GRACE_S),
            (self._compute, STOP_GRACE_S),
        ):
            self._stopping = plane
            statuses.append(plane.stop(HURRY_GRACE_S if self._is_hurried else grace_s))
        self._stopping = None
        # A plane that had not set up its signals yet ends by the signal itself.
        return all(status in (0, -signal.SIGTERM) for status in statuses)

    def hurry(self) -> None:
        """Hand a second signal on to the plane that is ending: it waits for nothing any more."""
        self._is_hurried = True
        if self._stopping is not None:
            self._stopping.hurry()
