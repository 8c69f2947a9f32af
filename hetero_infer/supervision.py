"""A plane that is started again when it ends, unless it cannot be started at all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from hetero_infer.plane_process import PlaneProcess, PlaneStartError
from hetero_infer.restarts import Restarts

EXIT_CONFIG = 2
"""A plane that ends with this at its first start will not do better the next time. One that has
served before may: its port, say, was taken in the moment that it was away."""

Ended = SimpleQueue[PlaneProcess | None]
"""Processes that have ended, each once; None: no more planes are to be started."""


class SupervisedPlane:
    """One plane, in whichever process it runs now.

    `start` starts one, without waiting until it serves; a plane that is started again takes its
    work up by itself. Every process that ends is put into `ended`, by a thread of its own. `say`
    is told what becomes of them.
    """

    def __init__(
        self,
        start: Callable[[], PlaneProcess],
        ended: Ended,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._ended = ended
        self._say = say
        self._clock = clock
        self._began = 0.0
        self._restarts = Restarts()
        self._is_restarted = False
        self.process: PlaneProcess | None = None
        self.due_at: float | None = None
        """When the next one is to be started, on `clock`; None: one runs."""

    def start(self) -> PlaneProcess:
        """Start the plane. Raises PlaneStartError if the machine cannot make it."""
        self.due_at = None
        self._began = self._clock()
        plane = self.process = self._start()

        def wait() -> None:
            plane.process.wait()
            self._ended.put(plane)

        try:
            threading.Thread(target=wait, name=f"wait-{plane.pid}", daemon=True).start()
        except RuntimeError as error:
            plane.kill()
            raise PlaneStartError(f"the {plane.name} could not be started: {error}") from None
        return plane

    def note_end(self) -> None:
        """Clean up after the process, which has ended, and say when another one is due.

        Raises PlaneStartError where the configuration is at fault, ExecutionError if the plane
        keeps ending before it serves.
        """
        plane = self.process
        assert plane is not None  # only a started one ends
        status, how = plane.stop(), plane.describe_end()
        if status == EXIT_CONFIG and not self._is_restarted:
            raise PlaneStartError(how, exit_status=status)
        self._plan_another(how, has_served=plane.has_served)

    def _plan_another(self, how: str, *, has_served: bool) -> None:
        """Say when another one is due. Raises ExecutionError as `note_end` does."""
        now = self._clock()
        self.due_at = now + self._restarts.pause_s(
            how, has_served=has_served, lived_s=now - self._began
        )
        self._say(f"{how}; starting another one")

    def start_if_due(self) -> None:
        """Start another process if its time has come.

        One that the machine cannot make now counts as one that ended at once: what took the memory
        may be what the plane has died of. Raises ExecutionError as `note_end` does.
        """
        if self.due_at is None or self._clock() < self.due_at:
            return
        try:
            plane = self.start()
        except PlaneStartError as error:
            self._plan_another(error.message, has_served=False)
            return
        self._is_restarted = True
        plane.show_output()  # nobody waits until it is ready
        self._say(f"{plane.name}: pid {plane.pid}")

    def stop(self, grace_s: float) -> int:
        """End the plane, see `PlaneProcess.stop`; 0 if none runs, nor has ended unnoticed."""
        if self.process is None or self.due_at is not None:
            self.due_at = None
            return 0
        return self.process.stop(grace_s)

    def hurry(self) -> None:
        """Ask once more for its end; safe in a signal handler."""
        if self.process is not None:
            self.process.process.terminate()


def take_turn(planes: Sequence[SupervisedPlane], ended: Ended) -> bool:
    """Wait until one of the planes has ended or is due, and see to it.

    False if None was put into `ended`. Raises what `SupervisedPlane.note_end` raises.
    """
    due = [plane.due_at for plane in planes if plane.due_at is not None]
    patience_s = max(0.0, min(due) - time.monotonic()) if due else None
    with contextlib.suppress(Empty):
        process = ended.get(timeout=patience_s)
        if process is None:
            return False
        for plane in planes:
            if plane.process is process:
                plane.note_end()
    for plane in planes:
        plane.start_if_due()
    return True
