"""A device that tests drive by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compute_plane.executor.driven_device import Driven
from tests.compute_plane.executor.pipelined_executors import TIMEOUT_S


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven()
    yield made
    made.executor.is_driven_by_hand = False
    for launched in made.executor.steps:
        launched.run()
    assert made.device.stop(TIMEOUT_S)
