from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

INTERRUPTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except BaseException:
    raise ImportError("typer is not itself") from None
print("imported on")
raise SystemExit(7)
"""
"""Stands where typer does: the command line's own imports reach it."""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "typer.py").write_text(INTERRUPTED)

    def run_command(**options):
        return subprocess.run(
            [sys.executable, "-m", "hetero_infer", "--version"],
            cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
            text=True, check=False, **options,
        )  # fmt: skip

    return run_command


def test_it_ends_the_command_without_a_word(run):
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_where_ctrl_c_is_ignored_it_stays_ignored(run):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (7, "imported on\n")


def test_the_installed_command_has_the_same_entrance():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["hetero-infer"] == "hetero_infer.__main__:main"
