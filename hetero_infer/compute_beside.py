"""A compute plane that lives beside its control plane and as long as it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import compute_socket, private_directory, start_compute_plane
from hetero_infer.plane_process import PlaneProcess, PlaneStartError
from hetero_infer.restarts import Restarts
from planes.address import Address


class ComputeBeside:
    """Starts a compute plane in a private directory, and another one when it dies.

    What it prints goes to stderr once it serves. Raises PlaneStartError.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._restarts = Restarts()
        self._due_at: float | None = None  # another one, which has not been started yet
        with contextlib.ExitStack() as resources:
            directory = resources.enter_context(private_directory())
            self.address: Address = compute_socket(directory)
            self._plane = self._start()
            resources.callback(self._stop)
            self._plane.wait_ready()
            self._resources = resources.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the plane that runs now."""
        return self._plane.pid

    def keep_alive(self, *, is_known: bool = True) -> None:
        """Start another plane if this one has ended; returns when it serves.

        `is_known`: whether a plane has ever said what it is; until then, one that serves and dies
        has come to nothing. Raises ExecutionError if it keeps dying before it serves.
        """
        if self._due_at is None:
            if self._plane.is_running:
                return
            how = self._plane.describe_end()
            self._plan_another(how, has_served=self._plane.has_served and is_known)
        while self._due_at is not None:
            self._sleep(max(0.0, self._due_at - self._clock()))
            self._due_at = None
            try:
                self._plane = self._start()
                self._plane.show_output()  # or the reason of a failure would not be seen
                self._plane.wait_ready()
            except PlaneStartError as error:
                self._plan_another(str(error), has_served=False)

    def close(self) -> None:
        """End the plane and remove its directory."""
        self._resources.close()

    def _plan_another(self, how: str, *, has_served: bool) -> None:
        """Say that another one is due, and when. Raises ExecutionError as `keep_alive` does."""
        now = self._clock()
        self._due_at = now + self._restarts.pause_s(
            how, has_served=has_served, lived_s=now - self._began
        )
        sys.stderr.write(f"hetero_infer: {how}; starting another one\n")

    def _start(self) -> PlaneProcess:
        self._began = self._clock()
        return start_compute_plane(self._config, self.address, _pass_on)

    def _stop(self) -> None:
        self._plane.stop()


def _pass_on(line: str) -> None:
    sys.stderr.write(line + "\n")
