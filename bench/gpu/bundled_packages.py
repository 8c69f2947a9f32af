"""Which Python packages `make gpu` needs that another machine lacks, by what packages require."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from compute_plane.model.source import DEFAULT_DISTRIBUTION

EXTRAS: Final = ("cuda", "http")
FOR_TESTS: Final = ("httpx", "hypothesis", "pytest", "pytest-xdist", "transformers")
"""Of the extra `test`: what tests on a device need, and an engine that ours is compared with."""
MODEL: Final = Requirement(DEFAULT_DISTRIBUTION)
"""The embedded model. Only a file of it is used, so what it requires is not wanted."""
TORCH: Final = "torch"
OF_THE_COMPILER: Final = "nvidia-"
"""How the names of CUDA's libraries begin. A CUDA torch brings some, a toolkit the others."""


def packages_there(listing: str) -> dict[str, str | None]:
    """Read what `pip list --format=freeze` or `pip freeze` printed: versions by canonical name.

    None: the version is not told.
    """
    there: dict[str, str | None] = {}
    for line in listing.splitlines():
        name, _, version = line.partition("==")
        name = name.partition("@")[0].strip()
        if name and not name.startswith(("#", "-")):
            there[canonicalize_name(name)] = version.strip() or None
    return there


def needed_packages(
    python: str, there: Mapping[str, str | None], *, with_compiler: bool = False
) -> dict[str, str]:
    """Return what must be brought, with the versions that are installed here.

    `python`: its version there, like 3.12. `there`: what that machine has, as `packages_there`; a
    package of it is brought only if something that is needed refuses its version. Raises
    PackageNotFoundError for what is not installed here.
    """
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
    }
    brought: dict[str, str] = {}
    seen = set()
    open_ones = list(_roots())
    while open_ones:
        one = open_ones.pop()
        name = canonicalize_name(one.name)
        if str(one) in seen or name == TORCH or not _applies(one, environment, ()):
            continue
        seen.add(str(one))
        if name.startswith(OF_THE_COMPILER) and not with_compiler:
            continue
        version = there.get(name)
        if name in there and (version is None or one.specifier.contains(version, prereleases=True)):
            continue
        package = metadata.distribution(name)
        brought[name] = package.version
        if name == MODEL.name:
            continue
        requirements = map(Requirement, package.requires or ())
        open_ones += (it for it in requirements if _applies(it, environment, one.extras))
    return brought


def pip_command(directory: Path, packages: Mapping[str, str], *options: str) -> list[str]:
    """Return the command that installs these versions, and nothing else, into a folder."""
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install",
        "--target", str(directory), "--no-deps", "--no-compile", "--only-binary=:all:", *options,
        *(f"{name}=={version}" for name, version in sorted(packages.items())),
    ]  # fmt: skip


def _roots() -> Iterator[Requirement]:
    """Yield what our own pyproject.toml requires of a machine that makes the report."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    optional = project["optional-dependencies"]
    yield from map(Requirement, project["dependencies"])
    for extra in EXTRAS:
        yield from map(Requirement, optional[extra])
    for one in map(Requirement, optional["test"]):
        if canonicalize_name(one.name) in FOR_TESTS:
            yield one
    yield MODEL


def _applies(one: Requirement, environment: Mapping[str, str], extras: Iterable[str]) -> bool:
    if one.marker is None:
        return True
    return any(one.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))
