"""One part of the report in a process of its own: `… bench.gpu.part_process PART FILE OPTIONS`.

The child runs `module:function` with a `Findings` and the `PartOptions`. The parent waits for as
long as the part may take, and takes what the child has written, however it ended. A child that has
lost the device is followed by another one, which begins behind what had lost it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.gpu.findings import Findings, PartOptions, line_of
from bench.gpu.one_by_one import EXIT_GOES_ON, DeviceLostError

EXIT_RAISED: Final = 70
GRACE_S: Final = 5.0
"""A part is told what it may take, and may end by itself so much later."""
MOST_PROCESSES: Final = 8
"""Of one part. A device that is lost so often is broken, or what drives it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report. `run`: `module:function`. `seconds`: the most it may take."""

    name: str
    run: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PartResult:
    """How a part ended, and what it found.

    `status`: `done`, `unfinished` (there was no time for all of it, and it can go on at
    `go_on_at`), `raised`, `cut`, `crashed` or `left out`; `why`, if it is not done. `values`,
    `failures` and `targets` as `Findings` has them.
    """

    status: str
    seconds: float
    why: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    go_on_at: int | None = None

    def behind(self, earlier: PartResult) -> PartResult:
        """Return both as one: objects and lists are joined, all else is as found last."""
        values = dict(earlier.values)
        for key, value in self.values.items():
            known = values.get(key)
            if isinstance(value, dict) and isinstance(known, dict):
                values[key] = known | value
            elif isinstance(value, list) and isinstance(known, list):
                values[key] = known + value
            else:
                values[key] = value
        return replace(
            self,
            seconds=earlier.seconds + self.seconds,
            values=values,
            failures=earlier.failures + self.failures,
            targets=earlier.targets + self.targets,
        )


def run_part(part: Part, options: PartOptions, seconds_left: float, file: Path) -> PartResult:
    """Run a part within its time and what is left of all; return what it found, come what may.

    It writes what it finds to `file` as it goes on, and that is there even if this process is
    killed; otherwise the file is removed in the end.
    """
    seconds = min(part.seconds, seconds_left)
    if seconds <= 0:
        return PartResult("left out", 0.0, "no time was left", go_on_at=options.begin_at or None)
    ends = time.monotonic() + seconds
    result, goes_on = _run_once(part, replace(options, seconds=seconds), file)
    for _ in range(MOST_PROCESSES - 1):
        left = ends - time.monotonic()
        if not goes_on or left <= 0:
            break
        again = replace(options, seconds=left, begin_at=result.go_on_at or 0)
        one, goes_on = _run_once(part, again, file)
        result = one.behind(result)
    return result


def _run_once(part: Part, told: PartOptions, file: Path) -> tuple[PartResult, bool]:
    """Run a part in one process; return what it found and whether another one should go on."""
    began = time.perf_counter()
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu.part_process", part.run, str(file), told.to_json()]
    # One that is killed leaves its models behind, of up to 16 GB. Short, for sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="g", ignore_cleanup_errors=True) as scratch:
        # A group of its own: what the part has started ends with it.
        process = subprocess.Popen(
            ["env", f"TMPDIR={scratch}", *command], stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code: int | None = process.wait(told.seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    doing = f", at {found['doing']}" if found.get("doing") else ""
    goes_on = code == EXIT_GOES_ON
    if code is None:
        ending = ("cut", f"it took longer than {told.seconds:.0f} s{doing}")
    elif code == EXIT_RAISED:
        ending = ("raised", found.get("why", "") + doing)
    elif goes_on or (code == 0 and found.get("go_on_at") is not None):
        why = "the device was lost too often" if goes_on else "no time was left"
        ending = ("unfinished", why + doing)
    elif code == 0:
        ending = ("done", "")
    else:
        ending = ("crashed", (f"signal {-code}" if code < 0 else f"status {code}") + doing)
    result = PartResult(
        *(ending[0], time.perf_counter() - began, ending[1]),
        *(found.get("values", {}), found.get("failures", []), found.get("targets", [])),
        found.get("go_on_at"),
    )
    return result, goes_on


def main(arguments: Sequence[str]) -> int:
    """Run one part in this process; the exit code."""
    name, file, told = arguments
    options = PartOptions.from_json(told)
    module, _, function = name.partition(":")
    findings = Findings(Path(file))
    try:
        run = getattr(importlib.import_module(module), function)
        run(findings, options)
    except DeviceLostError:
        findings.save()
        return EXIT_GOES_ON
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs in the report
        traceback.print_exc()
        findings.save()
        content = json.loads(Path(file).read_text())
        Path(file).write_text(json.dumps({**content, "why": line_of(error)}))
        return EXIT_RAISED
    findings.save()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A device that is lost may keep its libraries from ending.
    os._exit(status)
