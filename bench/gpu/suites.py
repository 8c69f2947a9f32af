"""The product's own black-box tests on the CUDA device, as a part of the report.

Golden models, integration, faults and properties are the same tests as everywhere, with
`--device cuda`; what fails is named in the report.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu.findings import Findings, PartOptions

FOLDERS: Final = ("tests/golden", "tests/properties", "tests/integration", "tests/faults")
"""What says most comes first: time may run out."""
WORKERS: Final = 4
"""Tests at once, where pytest-xdist is there: most of their time is planes that start."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest that come with a count."""
ROOT: Final = Path(__file__).parents[2]


def suites(found: Findings, options: PartOptions) -> None:  # noqa: ARG001 - as every part
    """Run the ordinary tests of each folder on the device."""
    has_workers = importlib.util.find_spec("xdist") is not None
    at_once = ["-n", str(WORKERS), "--dist", "loadfile"] if has_workers else []
    run_suites(found, FOLDERS, ["--device=cuda", "-m", "not slow and not gpu", *at_once])


def run_suites(found: Findings, folders: Sequence[str], flags: Sequence[str]) -> None:
    """Run pytest on each folder; the report gets `suites`, by folder."""
    results: dict[str, Any] = {}
    found.values["suites"] = results
    for folder in folders:
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.xml"
            command = [
                sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder,
                f"--junitxml={report}", *flags,
            ]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
            if not report.exists() or done.returncode not in (PASSED, FAILED):
                found.failures.append(f"{folder}: pytest ended with status {done.returncode}")
                continue
            results[folder] = counts = counted(report.read_text(encoding="utf-8"))
        if not counts["passed"] + counts["failed"]:
            found.failures.append(f"{folder}: every test was skipped")
        found.failures += [f"{folder}: {name}" for name in counts["failed_tests"]]
        found.say(
            f"{folder}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )


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
