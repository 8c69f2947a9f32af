"""The engine thread: runs the loop until it is told to stop or a fault stops it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from control_plane.engine.loop import EngineLoop
from control_plane.errors import (
    ComputeUnavailableError,
    DrainingError,
    EngineStoppedError,
    FencedError,
)
from planes.errors import EngineError

_log = structlog.get_logger(__name__)


class EngineThread:
    """Runs an `EngineLoop`.

    A fault of our own, or one that no retry can mend (fenced, another model), ends every request
    and is handed to `on_fault`, called on the engine thread, to be logged. Requests of a plane that
    another controller took end with ComputeUnavailableError, for they may go on there; others with
    EngineStoppedError: they must not go on at another model.
    """

    def __init__(self, loop: EngineLoop, *, on_fault: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_fault = on_fault
        self._is_stopping = False
        self._turns = self._turns_seen = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to run turns."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the loop after its turn, what still runs, and the compute session; wait for it."""
        self._is_stopping = True
        self._loop.wake()
        self._thread.join(timeout_s)

    def has_turned(self) -> bool:
        """Whether a turn has ended since this was last asked; makes an idle loop turn once more."""
        seen, self._turns_seen = self._turns_seen, self._turns
        self._loop.wake()
        return self._turns_seen != seen

    def _run(self) -> None:
        try:
            self._loop.step()  # a turn would begin with waiting
            while not self._is_stopping:
                self._loop.turn()
                self._turns += 1
            self._loop.fail_all(DrainingError("the server shut down before the request ended"))
        # Whatever it is, waiting clients must hear of it and the process must not idle on.
        except BaseException as fault:  # noqa: BLE001
            is_taken = isinstance(fault, FencedError)
            ends_as = ComputeUnavailableError if is_taken else EngineStoppedError
            self._fail_all(ends_as(f"the engine stopped: {fault}"))
            self._on_fault(fault)
        finally:
            self._loop.close()

    def _fail_all(self, error: EngineError) -> None:
        try:
            self._loop.fail_all(error)
        # The state that caused the fault may cause another one; the first is the one that counts.
        except Exception:  # noqa: BLE001
            _log.exception("requests could not be told that the engine stopped")
