"""The version of the distribution."""

from __future__ import annotations

import importlib.metadata

UNINSTALLED = "0+uninstalled"


def version() -> str:
    """Return the installed distribution's version; a constant where only the sources are there."""
    try:
        return importlib.metadata.version("hetero-paged-infer")
    except importlib.metadata.PackageNotFoundError:
        return UNINSTALLED
