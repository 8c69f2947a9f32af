"""A compute plane that lives beside its control plane and as long as it."""

from __future__ import annotations

import contextlib
import sys

from hetero_infer.config import EngineConfig
from hetero_infer.local_planes import compute_socket, private_directory, start_compute_plane
from hetero_infer.plane_process import PlaneProcess, describe_exit
from planes.address import Address
from planes.errors import ExecutionError

MAX_RESTARTS = 5
"""In the life of one engine; a plane that dies that often dies of what it is given."""


class ComputeBeside:
    """Starts a compute plane in a private directory, and another one when it dies.

    What it prints goes to stderr once it serves. Raises PlaneStartError.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._num_restarts = 0
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

    def keep_alive(self) -> None:
        """Start another plane if this one has ended. Raises ExecutionError if it keeps dying."""
        if self._plane.is_running:
            return
        how = describe_exit(self._plane.stop())
        if self._num_restarts >= MAX_RESTARTS:
            raise ExecutionError(f"the compute plane {how}; {MAX_RESTARTS} restarts did not help")
        self._num_restarts += 1
        sys.stderr.write(f"hetero_infer: the compute plane {how}; starting another one\n")
        self._plane = self._start()
        self._plane.wait_ready()

    def close(self) -> None:
        """End the plane and remove its directory."""
        self._resources.close()

    def _start(self) -> PlaneProcess:
        return start_compute_plane(self._config, self.address, _pass_on)

    def _stop(self) -> None:
        self._plane.stop()


def _pass_on(line: str) -> None:
    sys.stderr.write(line + "\n")
