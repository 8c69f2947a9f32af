"""The surroundings of commands that tests start."""

from __future__ import annotations

import pytest

from hetero_infer.config import child_environment


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """Children import this tree, and their private directories can be counted."""
    return {**child_environment(), "HETERO_HTTP_PORT": "0", "TMPDIR": str(tmp_path)}
