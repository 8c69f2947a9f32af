"""The units pass systemd's own checks; no service manager is needed for that."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
PYTHON = "/opt/hetero-paged-infer/bin/python"
MOST_EXPOSED = 1.5

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a unit whose program exists."""
    text = (UNITS / request.param).read_text(encoding="utf-8")
    assert PYTHON in text
    for name in UNITS.glob("*.service"):  # each names the other
        (tmp_path / name.name).write_text(
            name.read_text(encoding="utf-8").replace(PYTHON, sys.executable), encoding="utf-8"
        )
    return tmp_path / request.param


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


both = pytest.mark.parametrize(
    "unit", ["hetero-compute.service", "hetero-control.service"], indirect=True
)


@both
def test_a_unit_is_verified_without_a_word(unit: Path) -> None:
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr) == (0, "")


@both
def test_a_unit_is_sandboxed(unit: Path) -> None:
    threshold = str(int(10 * MOST_EXPOSED))
    done = analyze("security", "--offline=true", f"--threshold={threshold}", str(unit))
    assert done.returncode == 0, done.stdout


def test_the_control_plane_outlives_its_compute_plane() -> None:
    text = (UNITS / "hetero-control.service").read_text(encoding="utf-8")
    for bond in ("Requires=", "BindsTo=", "PartOf="):
        assert not any(line.startswith(bond) for line in text.splitlines())


def test_machine_code_may_be_made_where_kernels_are() -> None:
    text = (UNITS / "hetero-compute.service").read_text(encoding="utf-8")
    assert not any(line.startswith("MemoryDenyWriteExecute=") for line in text.splitlines())
