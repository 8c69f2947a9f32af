"""The units pass systemd's own checks; no service manager is needed for that."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compute_plane.config import load_config as load_compute
from control_plane.config import load_config as load_control

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


def started(monkeypatch: pytest.MonkeyPatch, unit: str, **options: str) -> list[str]:
    """Return the arguments of a plane that a unit starts; its environment is the process's own.

    `options`: of its EnvironmentFile, which systemd reads after Environment.
    """
    text = (UNITS / unit).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.partition("=") for line in text.splitlines()]
    given = [word for name, _, value in lines if name == "Environment" for word in value.split()]
    for name, value in [*(word.split("=", 1) for word in given), *options.items()]:
        monkeypatch.setenv(name, value)
    (command,) = (value for name, _, value in lines if name == "ExecStart")
    return shlex.split(command)[3:]  # python -m PLANE


def test_the_units_meet_on_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = load_compute(started(monkeypatch, "hetero-compute.service")).config
    control = load_control(started(monkeypatch, "hetero-control.service")).config
    assert control.compute_addresses == (compute.listen_address,)
    assert compute.kernel_cache == "/var/cache/hetero-compute/kernels"
    assert (control.log_format, compute.log_format) == ("json", "json")


def test_what_an_environment_file_says_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "HETERO_COMPUTE": "unix:/run/other",
        "HETERO_GRPC_PORT": "7",
        "HETERO_LOG_FORMAT": "console",
    }
    control = load_control(started(monkeypatch, "hetero-control.service", **options)).config
    assert (control.compute, control.grpc_port, control.log_format) == (
        "unix:/run/other",
        7,
        "console",
    )
    options = {
        "HETERO_LISTEN": "unix:/run/other",
        "HETERO_KERNEL_CACHE": "/k",
        "HETERO_LOG_FORMAT": "console",
    }
    compute = load_compute(started(monkeypatch, "hetero-compute.service", **options)).config
    assert (compute.listen, compute.kernel_cache, compute.log_format) == (
        "unix:/run/other",
        "/k",
        "console",
    )
