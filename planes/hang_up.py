"""What SIGHUP means to a process: its terminal is gone, or a habit of whoever tends services."""

from __future__ import annotations

import os
from typing import Final

STANDARD_INPUT: Final = 0


def has_terminal() -> bool:
    """Whether it was started at a terminal, and is to end with it.

    Elsewhere SIGHUP asks for files to be read again, which is nothing to end for: tokens and
    certificates are looked at whenever they are used.
    """
    return os.isatty(STANDARD_INPUT)
