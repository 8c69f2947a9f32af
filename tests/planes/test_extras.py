"""Extras are named as they are, with the way that the package can be had."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from control_plane.http import server
from control_plane.metrics import instruments
from control_plane.tracing import provider
from hetero_infer.bench import plots
from planes.extras import the_extra

ROOT = Path(__file__).parents[2]


def test_an_extra_is_installed_from_the_source_as_the_readme_does_it():
    assert the_extra("http") == (
        "the extra 'http' (in the source directory: pip install -c constraints.txt -e '.[http]')"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt -e '.[http]'" in readme


@pytest.mark.parametrize("module", [server, instruments, provider, plots])
def test_what_messages_name_is_an_extra(module):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert module.EXTRA in project["optional-dependencies"]
