"""Names that nobody knows, and what somebody may have meant who wrote them."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping

from planes.settings import ENV_PREFIX, settings_of


def meant(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that is spelled most like this one; None if none is near.

    `likeness`: how near it must be, 1: the same.
    """
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=likeness)), None)


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the end of a message, `: did you mean 'x'?`; empty if no known name is near."""
    found = meant(name, known, likeness)
    return "" if found is None else f": did you mean {found!r}?"


def unknown_variables(
    environ: Mapping[str, str], *classes: type, also: Container[str] = ()
) -> list[str]:
    """Say of each `HETERO_*` variable that none of the classes declares it, one line each, sorted.

    `also`: variables that others know.
    """
    known = {item.name for cls in classes for item in settings_of(cls)}
    lines = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX).lower()
        is_ours = variable.startswith(ENV_PREFIX) and variable not in also
        if not is_ours or (variable == ENV_PREFIX + name.upper() and name in known):
            continue
        found = meant(name, known)
        hint = "" if found is None else f": did you mean {ENV_PREFIX}{found.upper()}?"
        lines.append(f"{variable} is ignored, no setting is called so{hint}")
    return lines
