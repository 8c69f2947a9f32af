"""Standard output of the commands: every text gets out, and a failure to write is told."""

from __future__ import annotations

import errno
import io
import os
import sys

WRITE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def let_all_text_out() -> None:
    """Have text that the locale cannot spell written all the same: as UTF-8, but on a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")
        else:
            sys.stdout.reconfigure(encoding="utf-8")


def flushed(status: int) -> int:
    """Write out what is left, while a failure to do so can still be reported."""
    sys.stdout.flush()
    return status


def drop_output() -> None:
    """Nobody takes it any more, and Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
