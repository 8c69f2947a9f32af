"""What compute-sanitizer prints and exits with is understood; a script stands in its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cuda import pathfinder

from bench.gpu import sanitizers
from bench.gpu.findings import Findings, PartOptions

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
RACE = (
    "========= COMPUTE-SANITIZER\n========= Error: Race reported between Write and Read\n"
    "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
)
REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to …\n"


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a program in the tool's place that writes a text to its log and exits so."""

    def play(text: str, code: int) -> None:
        program = tmp_path / "compute-sanitizer"
        program.write_text(
            f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
            "log = next(a for a in sys.argv if a.startswith('--log-file='))\n"
            f"Path(log.partition('=')[2]).write_text({text!r})\n"
            f"print('ran 3 of 31 variants')\nsys.exit({code})\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(sanitizers.shutil, "which", lambda _: str(program))

    return play


def run(tmp_path: Path) -> Findings:
    found = Findings()
    sanitizers.sanitizers(found, PartOptions(tmp_path, seconds=60.0))
    return found


def test_a_clean_run_is_no_fault(played, tmp_path):
    played(CLEAN, 0)
    found = run(tmp_path)
    assert found.failures == []
    statuses = {tool: result["status"] for tool, result in found.values["sanitizers"].items()}
    assert statuses == {"memcheck": "clean", "racecheck": "clean"}
    assert found.values["sanitizers"]["memcheck"]["variants"] == [3, 31]


def test_what_a_tool_finds_is_a_fault_of_its_name(played, tmp_path):
    played(RACE, sanitizers.EXIT_FOUND)
    found = run(tmp_path)
    assert [failure.partition(":")[0] for failure in found.failures] == ["memcheck", "racecheck"]
    assert "1 hazard displayed" in found.failures[1]


@pytest.mark.parametrize(
    ("text", "code", "status", "is_fault"),
    [
        (REFUSED, 1, "not supported", False),
        (CLEAN, 1, "failed", True),  # the watched program raised
        ("", 0, "failed", True),  # nothing was watched
    ],
)
def test_a_tool_that_watched_nothing_is_never_clean(played, tmp_path, text, code, status, is_fault):
    played(text, code)
    found = run(tmp_path)
    assert {result["status"] for result in found.values["sanitizers"].values()} == {status}
    assert bool(found.failures) == is_fault


def test_a_machine_without_the_tool_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitizers.shutil, "which", lambda _: None)
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda _: None)
    found = run(tmp_path)
    why = "compute-sanitizer is neither on the PATH nor in a CUDA toolkit"
    assert found.values["sanitizers"] == {"missing": why}
    assert found.failures == []


def test_a_tool_that_only_a_toolkit_has_is_found(monkeypatch):
    monkeypatch.setattr(sanitizers.shutil, "which", lambda _: None)
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: f"/toolkit/{name}")
    assert sanitizers.find_program() == "/toolkit/compute-sanitizer"


def test_a_tool_whose_time_is_over_takes_what_it_watches_with_it(tmp_path):
    """Otherwise the watched program would keep the device busy while the next tool runs."""
    program, alive = tmp_path / "tool", tmp_path / "alive"
    os.mkfifo(alive)
    # The watched program holds the fifo open for writing, and so does nobody else.
    program.write_text(f"#!/bin/sh\nsh -c 'exec 3>{alive}; sleep 600; true' &\nwait\n")
    program.chmod(0o755)
    with open(os.open(alive, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        result = sanitizers.watch(str(program), "memcheck", ["x"], 1.0)
        assert result["status"] == "cut"
        os.set_blocking(reader.fileno(), True)
        assert reader.read() == ""
