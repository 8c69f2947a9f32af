"""`--device cuda` where there is no such device: every way in ends at once, with the reason."""

from __future__ import annotations

import subprocess

import pytest

from hetero_infer import EngineConfig, InferenceEngine
from hetero_infer.plane_process import PlaneStartError
from tests.hetero_infer.command_processes import run

OFFERED = "--device cpu computes on the processor"


@pytest.fixture
def without_devices(environ: dict[str, str]) -> dict[str, str]:
    return {**environ, "CUDA_VISIBLE_DEVICES": ""}


def told(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that say why."""
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    return [line for line in result.stderr.splitlines() if OFFERED in line]


def test_one_text_is_refused_in_one_line(without_devices: dict[str, str]) -> None:
    result = run(without_devices, "--input", "hi", "--quiet", "--device", "cuda:1")
    (line,) = told(result)
    assert result.stderr.splitlines() == [line]
    assert result.stdout == ""
    assert line.startswith("hetero-infer: error: the compute plane ended with status 2: ")
    assert "device: cuda:1: " in line


@pytest.mark.wide
def test_a_server_ends_with_both_planes_and_its_last_line_says_why(
    without_devices: dict[str, str],
) -> None:
    result = run(
        without_devices, "serve", "--device", "cuda", "--grpc-port", "0", "--no-http",
        "--log-level", "error",
    )  # fmt: skip
    of_plane, last = told(result)
    assert of_plane.startswith("compute_plane: device: cuda: ")
    assert last == result.stderr.splitlines()[-1]
    assert last.startswith("hetero-infer: error: the compute plane ended with status 2: device: ")


def test_an_engine_in_python_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlaneStartError, match="device: cuda: ") as caught:
        InferenceEngine(EngineConfig(device="cuda"))
    assert caught.value.exit_status == 2
    assert OFFERED in caught.value.output[-1]
