"""A driver as a process: asked line by line, for as long as the tests run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.integration.clients.case_table import HERE, Client

PATIENCE_S = 180.0
"""Longer than any driver waits for the server."""

PROGRAMS = {"python": sys.executable, "node": shutil.which("node")}


class DriverFault(Exception):
    """A driver ended, or its client library did something that is no answer."""


class Driver:
    """One client, which knows nothing but a host and two ports. `log`: gets its stderr."""

    def __init__(self, client: Client, address: tuple[str, int, int], log: Path) -> None:
        program, script = client.command
        found = PROGRAMS[program]
        assert found is not None, f"{program} is not installed: {client.name} cannot be driven"
        self._name, self._log = client.name, log
        host, grpc_port, http_port = address
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [found, str(HERE / "drivers" / script), host, str(grpc_port), str(http_port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises DriverFault."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(PATIENCE_S, process.kill)
        alarm.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace")[-4000:]
            raise DriverFault(f"the driver of {self._name} has ended: {said}")
        answer: dict[str, Any] = json.loads(line)
        if "fault" in answer:
            raise DriverFault(f"{self._name}: {answer['fault']}")
        return answer
