"""The command as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from hetero_infer.config import child_environment

COMMAND = [sys.executable, "-P", "-m", "hetero_infer"]
SIMULATED = ["--executor", "simulated"]
PATIENCE_S = 120.0


def environment(directory: Path) -> dict[str, str]:
    """Children import this tree, and their private directories, in this one, can be counted."""
    return {**child_environment(), "HETERO_HTTP_PORT": "0", "TMPDIR": str(directory)}


def private_directories(environ) -> list[Path]:
    return list(Path(environ["TMPDIR"]).glob("hetero-*"))


def run(environ, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [*COMMAND, *argv],
        env=environ,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert private_directories(environ) == []
    return result


@contextlib.contextmanager
def started(
    environ, *argv: str, stdin: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *argv],
        env=environ,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        process_group=0,
    )
    # Whoever reads what never comes finds the end of the pipe in the end.
    alarm = threading.Timer(2 * PATIENCE_S, process.kill)
    alarm.start()
    with process:
        try:
            yield process
        finally:
            alarm.cancel()
            process.kill()
