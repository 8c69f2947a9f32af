"""PTX as the assembler of a capability takes it.

It is made once, for the lowest capability. The instructions of `instructions.early_launch` came
with a later one: for devices before that they are taken out, which changes nothing but when a
launch begins; for others the text is said to be for the first that has them.
"""

from __future__ import annotations

import re
from typing import Final

EARLY_LAUNCHES: Final = (9, 0)
"""The least capability of devices whose launches may begin before the one ahead has ended."""

_LINES: Final = re.compile(
    r"^[ \t]*(?:griddepcontrol\.\w+|cp\.async\.bulk\.prefetch[^;]*);[ \t]*\n", re.MULTILINE
)
_TARGET: Final = re.compile(r"^\.target sm_\d+", re.MULTILINE)


def fitted(ptx: str, capability: tuple[int, int]) -> str:
    """Return PTX for a capability; as it is if it has none of these instructions."""
    if not _LINES.search(ptx):
        return ptx
    if capability < EARLY_LAUNCHES:
        return _LINES.sub("", ptx)
    major, minor = EARLY_LAUNCHES
    return _TARGET.sub(f".target sm_{major}{minor}", ptx, count=1)
