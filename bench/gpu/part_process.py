"""One part of the report in a process of its own: `… bench.gpu.part_process PART FILE OPTIONS`.

The child runs `module:function` with a `Findings` and the `PartOptions`. The parent waits for as
long as the part may take, and takes what the child has written, however it ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.gpu.findings import Findings, PartOptions

EXIT_RAISED: Final = 70
GRACE_S: Final = 5.0
"""A part is told what it may take, and may end by itself so much later."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report. `run`: `module:function`. `seconds`: the most it may take."""

    name: str
    run: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PartResult:
    """How a part ended: `done`, `raised`, `cut`, `crashed` or `left out`, and what it found."""

    status: str
    seconds: float
    found: dict[str, Any]
    why: str = ""

    def merge_into(self, report: dict[str, Any], name: str) -> None:
        """Put it into the report: objects and lists are joined, all else takes its place."""
        for key, value in self.found.get("values", {}).items():
            known = report.get(key)
            if isinstance(value, dict) and isinstance(known, dict):
                known.update(value)
            elif isinstance(value, list) and isinstance(known, list):
                known += value
            else:
                report[key] = value
        report["failures"] += self.found.get("failures", [])
        report["targets"] += self.found.get("targets", [])
        if self.status != "done":
            report["failures"].append(f"{name}: {self.status}: {self.why}")
        ending = {"status": self.status, "seconds": round(self.seconds, 1)}
        report["parts"][name] = {**ending, "why": self.why} if self.why else ending


def run_part(part: Part, options: PartOptions, seconds_left: float, file: Path) -> PartResult:
    """Run a part within its time and what is left of all; return what it found, come what may.

    It writes what it finds to `file` as it goes on, and that is there even if this process is
    killed; otherwise the file is removed in the end.
    """
    seconds = min(part.seconds, seconds_left)
    if seconds <= 0:
        return PartResult("left out", 0.0, {}, "no time was left")
    began = time.perf_counter()
    file.unlink(missing_ok=True)
    told = replace(options, seconds=seconds).to_json()
    command = [sys.executable, "-m", "bench.gpu.part_process", part.run, str(file), told]
    # A group of its own: what the part has started ends with it.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code: int | None = process.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    took = time.perf_counter() - began
    why = found.pop("why", "") if code == EXIT_RAISED else ""
    if code == 0:
        return PartResult("done", took, found)
    if code is None:
        return PartResult("cut", took, found, f"it took longer than {seconds:.0f} s")
    if code == EXIT_RAISED:
        return PartResult("raised", took, found, why)
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return PartResult("crashed", took, found, how)


def main(arguments: Sequence[str]) -> int:
    """Run one part in this process; the exit code."""
    name, file, told = arguments
    module, _, function = name.partition(":")
    findings = Findings(Path(file))
    try:
        run = getattr(importlib.import_module(module), function)
        run(findings, PartOptions.from_json(told))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in the report
        traceback.print_exc()
        findings.save()
        content = json.loads(Path(file).read_text())
        line = (str(error).splitlines() or [""])[0]
        Path(file).write_text(json.dumps({**content, "why": f"{type(error).__name__}: {line}"}))
        return EXIT_RAISED
    findings.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
