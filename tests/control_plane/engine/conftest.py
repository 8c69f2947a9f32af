from __future__ import annotations

import pytest

from tests.control_plane.engine.loop_driver import Driver


@pytest.fixture
def drive(compute_address):
    drivers = []

    def make(**options):
        drivers.append(Driver(compute_address, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.loop.close()
        driver.client.shut_down()


@pytest.fixture
def planes(tmp_path, fake_plane_class):
    """Two planes; a test starts those that it wants there from the beginning."""
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in ("one", "two")]
    planes = [fake_plane_class(socket, num_blocks=2048) for socket in sockets]
    yield planes
    for plane in planes:
        if hasattr(plane, "server"):
            plane.kill()
