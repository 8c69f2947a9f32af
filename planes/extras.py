"""How to get what the package does without: it is on no index, so that its source is named."""

from __future__ import annotations


def the_extra(name: str) -> str:
    """Name one of the package's extras, and how it is installed."""
    command = f"pip install -c constraints.txt -e '.[{name}]'"
    return f"the extra {name!r} (in the source directory: {command})"
