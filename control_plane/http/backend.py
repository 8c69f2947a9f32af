"""What the routes work with: the server's state, and the engine once there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from control_plane.engine.frontend import EngineFrontend
from control_plane.engine.gate import Gate
from control_plane.errors import ComputeUnavailableError
from control_plane.http.body_size import Held
from control_plane.http.spelling import Speller
from control_plane.metrics.visits import VisitMeter
from planes.default_int import DefaultInt

MetricsPage: TypeAlias = Callable[[], tuple[bytes, str]]
"""Makes the page of `/metrics`: its bytes and their content type."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what the routes derive from it once. `created`: when it came, Unix seconds.

    `frontend`: of what a request asks, the model or an adapter.
    """

    frontend: EngineFrontend
    speller: Speller
    created: int

    @property
    def model(self) -> str:
        """The name of what is asked: the loaded model, or one of its adapters."""
        return self.frontend.model

    @property
    def base_model(self) -> str | None:
        """The name of the loaded model, where an adapter of it is asked; None: it is itself."""
        model = self.frontend.plane.model
        return None if model == self.model else model

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: equal ones give equal tokens for equal requests."""
        return self.frontend.plane.numerics_id

    @property
    def max_new_tokens(self) -> DefaultInt:
        """All that the context has room for, where nobody says how many tokens there may be."""
        return DefaultInt(self.frontend.max_model_len)


class Backend:
    """Serves one engine, once there is one; until then every route of `/v1` answers 503.

    `metrics`: what `/metrics` shows; None: there is no such page. `visits`: counts the requests.
    """

    def __init__(self, gate: Gate, *, visits: VisitMeter | None = None) -> None:
        self.gate = gate
        self.metrics: MetricsPage | None = None
        self.visits = visits or VisitMeter()
        self.held = Held()
        self._engine: LoadedEngine | None = None

    def attach(self, frontend: EngineFrontend) -> None:
        """Begin to serve."""
        self._engine = LoadedEngine(frontend, Speller(frontend.tokenizer), int(time.time()))

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest request; None: no model is loaded."""
        return None if self._engine is None else self._engine.frontend.max_model_len

    def require_engine(self, model: str | None = None) -> LoadedEngine:
        """Return the engine of a model or adapter, None: the model. Raises EngineError."""
        engine = self._engine
        if engine is None:
            self.gate.check()
            raise ComputeUnavailableError("the compute plane is not there yet")
        if model is None:
            return engine
        return replace(engine, frontend=engine.frontend.of_model(model))
