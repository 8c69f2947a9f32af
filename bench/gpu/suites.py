"""The product's own black-box tests on the CUDA device, as a part of the report.

Golden models, integration, faults and properties are the same tests as everywhere, with
`--device cuda`; what fails is named in the report.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu.findings import Findings, PartOptions

FOLDERS: Final = ("tests/golden", "tests/properties", "tests/faults", "tests/integration")
"""What says most comes first: time may run out."""
CHOICES: Final = {
    "": "not wide and not slow and not gpu",
    ", wide": "wide and not slow and not gpu",
}
"""Which tests, by what the report has behind the name of their folder: cheap ones of all folders
come before dear ones of any."""
WORKERS: Final = 8
"""Tests at once at most, where pytest-xdist is there: most of their time is planes that start."""
CORES_OF_WORKER: Final = 2
PASSED, FAILED, INTERRUPTED, NOTHING_CHOSEN = 0, 1, 2, 5
"""Exit statuses of pytest that come with a count."""
STOP_S: Final = 20.0
"""What pytest gets, once it is interrupted, to write down what it knows."""
OWN_PLUGINS: Final = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1")
"""A machine has plugins for whatever else it does, some of which may not go with this pytest."""
ROOT: Final = Path(__file__).parents[2]


def suites(found: Findings, options: PartOptions) -> None:
    """Run the ordinary tests of each folder on the device."""
    has_workers = importlib.util.find_spec("xdist") is not None
    workers = max(1, min(WORKERS, len(os.sched_getaffinity(0)) // CORES_OF_WORKER))
    at_once = ["-p", "xdist", "-n", str(workers), "--dist", "loadfile"] if has_workers else []
    # What other versions of libraries warn of is no news of the device.
    quiet = ["-o", "filterwarnings=default", "--disable-warnings", "--tb=short", "-rfE"]
    # A file that lacks a package takes no others with it.
    flags = ["--device=cuda", "--continue-on-collection-errors"]
    run_suites(found, FOLDERS, [*flags, *quiet, *at_once], options)


def run_suites(
    found: Findings,
    folders: Sequence[str],
    flags: Sequence[str],
    options: PartOptions,
    choices: Mapping[str, str] = CHOICES,
) -> None:
    """Run pytest on each folder, with each choice of tests; the report gets `suites`, by both.

    A run that is not done when time is over is interrupted, and counted as far as it came. It is
    where a report that is continued goes on.
    """
    results: dict[str, Any] = {}
    found.values["suites"] = results
    num_run: Counter[str] = Counter()
    runs = [(folder, choice) for choice in choices for folder in folders]
    for number, (folder, choice) in list(enumerate(runs))[options.begin_at :]:
        name = folder + choice
        found.begin(name)
        left = options.ends - STOP_S - time.monotonic()
        if left <= 0:
            found.go_on_at = number
            return
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            command = [
                *OWN_PLUGINS, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                folder, f"--junitxml={report}", "-m", choices[choice], *flags,
            ]  # fmt: skip
            status, is_cut = _run(command, left)
            counts = counted(report.read_text(encoding="utf-8")) if report.exists() else None
        if counts is not None:
            results[name] = counts
            num_run[folder] += counts["passed"] + counts["failed"]
            found.say(
                f"{name}: {counts['passed']} passed, {counts['failed']} failed, "
                f"{counts['skipped']} skipped"
            )
        if is_cut:
            found.go_on_at = number
            return
        # Of a folder all tests that a device runs may be of one choice.
        is_last = number + len(folders) >= len(runs)
        faults = _faults(status, counts, nothing_ran=is_last and not num_run[folder])
        lines = (f"{folder}: {fault}" for fault in faults)
        # A file that cannot be collected is a fault of each choice.
        found.failures += [line for line in lines if line not in found.failures]
    found.doing = ""


def _faults(status: int, counts: dict[str, Any] | None, *, nothing_ran: bool) -> list[str]:
    """Return what is wrong about a run of pytest that came to its end."""
    if counts is None or status not in (PASSED, FAILED, INTERRUPTED, NOTHING_CHOSEN):
        return [f"pytest ended with status {status}"]
    faults = []
    if status == INTERRUPTED:
        faults.append("not every test could be collected and run")
    elif nothing_ran:
        faults.append("every test was skipped")
    return [*faults, *counts["failed_tests"]]


def _run(command: Sequence[str], seconds: float) -> tuple[int, bool]:
    """Run pytest; return its status, and whether it was interrupted, as by Ctrl-C."""
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL) as process:
        try:
            return process.wait(seconds), False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            return process.wait(STOP_S), True
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(), True


def counted(junit: str) -> dict[str, Any]:
    """Return how many tests of a JUnit report passed, failed and were skipped, and who failed."""
    passed, skipped = 0, 0
    failed = []
    for case in ET.fromstring(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "failed_tests": failed}
