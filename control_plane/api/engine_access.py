"""The engine as the servicers share it: not there at first."""

from __future__ import annotations

from control_plane.engine.frontend import EngineFrontend
from control_plane.engine.gate import Gate
from control_plane.errors import ComputeUnavailableError


class EngineAccess:
    """Holds the engine once there is one; until then everything is UNAVAILABLE.

    `gate`: knows why, if the server does not just wait for its first compute plane.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._engine: EngineFrontend | None = None

    def attach(self, engine: EngineFrontend) -> None:
        """Begin to serve."""
        self._engine = engine

    def require(self, model: str = "") -> EngineFrontend:
        """Return the engine of the model or adapter asked for; empty, as in protobuf: the model.

        Raises ComputeUnavailableError, DrainingError, EngineStoppedError, ModelNotFoundError.
        """
        engine = self._engine
        if engine is None:
            self._gate.check()
            raise ComputeUnavailableError("the compute plane is not there yet")
        return engine.of_model(model) if model else engine
