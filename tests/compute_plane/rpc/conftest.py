from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compute_plane.rpc.plane_harness import Harness


@pytest.fixture(scope="session")
def shared_plane() -> Iterator[Harness]:
    """A plane for tests that leave it sound; each opens its own session."""
    with tempfile.TemporaryDirectory() as directory:
        harness = Harness(Path(directory))
        yield harness
        harness.close()


@pytest.fixture
def own_plane() -> Iterator[Harness]:
    """A plane of the test's own, to stop or break."""
    with tempfile.TemporaryDirectory() as directory:
        harness = Harness(Path(directory))
        yield harness
        harness.close()
