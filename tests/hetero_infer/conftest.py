"""The surroundings of commands that tests start."""

from __future__ import annotations

import pytest

from tests.hetero_infer.command_processes import environment


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """Those of one test; see `environment`."""
    return environment(tmp_path)
