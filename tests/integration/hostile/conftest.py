"""The real deployment of all black-box tests, with both of its ports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.conftest import Deployment
from tests.integration.hostile.neighbour import Ports


@pytest.fixture(scope="module")
def ports(deployment: Deployment) -> Iterator[Ports]:
    made = Ports(deployment.control, deployment.http)
    yield made
    made.close()
