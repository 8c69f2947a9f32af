"""Whether new requests may come in, and if not, why."""

from __future__ import annotations

import enum

from control_plane.errors import (
    ComputeUnavailableError,
    DrainingError,
    EngineStoppedError,
    FencedError,
)


class GateState(enum.Enum):
    """STARTING → OPEN ⇄ AWAY → DRAINING, or STOPPED from anywhere. AWAY: plane lost, retrying."""

    STARTING = "starting"
    OPEN = "open"
    AWAY = "away"
    DRAINING = "draining"
    STOPPED = "stopped"


class Gate:
    """The server's state as clients meet it. Used on the event loop only.

    While the plane is AWAY requests still come in: they wait for it like those under way, and the
    engine refuses them once the grace is over.
    """

    def __init__(self) -> None:
        self._state = GateState.STARTING

    @property
    def state(self) -> GateState:
        """The state now."""
        return self._state

    @property
    def is_serving(self) -> bool:
        """What the health service says."""
        return self._state is GateState.OPEN

    def set_linked(self, *, is_linked: bool) -> None:
        """Follow the link; a server that drains or has stopped stays as it is."""
        if self._state in (GateState.STARTING, GateState.OPEN, GateState.AWAY) and (
            is_linked or self._state is not GateState.STARTING
        ):
            self._state = GateState.OPEN if is_linked else GateState.AWAY

    def drain(self) -> None:
        """Take no new requests from now on."""
        if self._state is not GateState.STOPPED:
            self._state = GateState.DRAINING

    def stop(self, fault: BaseException) -> None:
        """Note that the engine is gone; if its plane was taken, clients are told to come again."""
        if isinstance(fault, FencedError):
            self.drain()
        else:
            self._state = GateState.STOPPED

    def check(self) -> None:
        """Raise the error a new request meets, if it may not come in."""
        if self._state is GateState.STARTING:
            raise ComputeUnavailableError("the compute plane is not there yet")
        if self._state is GateState.DRAINING:
            raise DrainingError("the server is draining: it takes no new requests")
        if self._state is GateState.STOPPED:
            raise EngineStoppedError("the engine has stopped; see its log")
