"""A map in a package's docstring names each of its modules once, and nothing that is not there.

    subject    module, module (what it is) → module; module

Lines of a map are indented; what is in parentheses is prose. An arrow leads to what is used. Maps
of `bench` say a module a line.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEPARATORS = re.compile(r"[,;→=+|]")


def docstring(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""


def modules_of(package: Path) -> list[str]:
    return sorted({path.stem for path in package.glob("*.py")} - {"__init__", "__main__"})


def map_of(package: Path) -> str:
    return "\n".join(line for line in docstring(package).splitlines() if line.startswith("    "))


def modules_named(drawn: str) -> list[str]:
    """Return what a map names, subjects left out."""
    names = re.sub(r"(?m)^ {4}\S.*?(?: {2,}|$)", "; ", drawn)
    names = " ".join(re.sub(r"\([^()]*\)", "", names).split())
    return [name.strip() for name in SEPARATORS.split(names) if name.strip()]


MAPPED = [
    init.parent
    for plane in ("compute_plane", "control_plane")
    for init in sorted((ROOT / plane).rglob("__init__.py"))
    if map_of(init.parent)
]


@pytest.mark.parametrize("package", MAPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_stands_in_the_map_once_and_nothing_else_does(package: Path) -> None:
    assert sorted(modules_named(map_of(package))) == modules_of(package)


@pytest.mark.parametrize("package", ["bench/gpu", "bench/gpu/cases", "bench/host"])
def test_every_module_has_a_line(package: str) -> None:
    lines = re.findall(r"(?m)^(\w+) {2,}", docstring(ROOT / package))
    assert sorted(lines) == modules_of(ROOT / package)


def test_a_map_is_read_by_its_columns() -> None:
    drawn = """\
    a step    queue, running (who has a
              slot, and runs) → step;
              results failures
    books     book"""
    assert modules_named(drawn) == ["queue", "running", "step", "results failures", "book"]


def test_large_packages_of_the_planes_have_maps() -> None:
    large = {"core", "cpu", "cuda", "engine", "executor", "model"}
    assert large <= {package.name for package in MAPPED}
