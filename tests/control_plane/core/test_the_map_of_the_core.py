"""The package's docstring says of every module where it belongs."""

from __future__ import annotations

import re
from pathlib import Path

import control_plane.core


def test_every_module_stands_in_the_map() -> None:
    named = set(re.findall(r"\w+", control_plane.core.__doc__ or ""))
    modules = {path.stem for path in Path(control_plane.core.__file__).parent.glob("*.py")}
    assert modules - {"__init__"} <= named
