"""Before there is an engine, gRPC says why there is none as HTTP does."""

from __future__ import annotations

import pytest

from control_plane.api.engine_access import EngineAccess
from control_plane.engine.gate import Gate
from control_plane.errors import ComputeUnavailableError, DrainingError


def test_a_server_that_ends_before_it_had_an_engine_says_that_it_ends():
    gate = Gate()
    access = EngineAccess(gate)
    with pytest.raises(ComputeUnavailableError):
        access.require()
    gate.drain()
    with pytest.raises(DrainingError):
        access.require()
