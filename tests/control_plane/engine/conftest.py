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
