"""The bench of what steps cost the host runs; its figures are of decode steps, on graphs or off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.host.__main__ import main
from bench.host.played_device import PlayedDriver
from bench.host.stages import COMPUTE, CONTROL, STAGES, WARM_UP


@pytest.mark.wide
def test_every_stage_of_every_decode_step_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "host.json"
    assert main(["--rows", "1,3", "--context", "40", "--steps", "30", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert [result["rows"] for result in results] == [1, 3]
    for result in results:
        assert set(result["medians_us"]) == set(result["means_us"]) == set(STAGES)
        assert result["steps"] > 30 - WARM_UP - 5
        calls = result["calls_of_a_step"]
        assert calls["replays"] == calls["events"] == 1
        assert calls["copies"] == 3  # inputs, tokens of the step before, and results
        assert calls["launches"] >= 1  # the samples, behind the graph
    assert set(COMPUTE) | set(CONTROL) == set(STAGES)
    assert "3 rows, median µs: compute plane" in capsys.readouterr().out


def test_steps_are_launched_kernel_by_kernel_where_a_number_of_layers_is_given(
    tmp_path: Path,
) -> None:
    launches = []
    for layers in (1, 3):
        out = tmp_path / f"{layers}.json"
        given = ["--rows", "2", "--context", "40", "--steps", "30", "--layers", str(layers)]
        assert main([*given, "--out", str(out)]) == 0
        (result,) = json.loads(out.read_text())
        assert result["calls_of_a_step"]["replays"] == 0
        launches.append(result["calls_of_a_step"]["launches"])
    # Two norms, rotation, attention, gate: products are torch's.
    assert launches[1] - launches[0] == 2 * 5


def test_steps_of_the_played_device_take_their_time_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, slept = [10.0], []
    monkeypatch.setattr("bench.host.played_device.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("bench.host.played_device.time.sleep", slept.append)
    device = PlayedDriver(step_us=500.0)
    buffer, results = device.host_buffer(8), device.device_buffer(8)
    first, second = (device.download(buffer, results) for _ in range(2))
    assert not first.is_done()
    second.wait()
    first.wait()
    assert slept == pytest.approx([1e-3, 5e-4])
    now[0] = 11.0
    assert second.is_done()
    second.wait()
    assert len(slept) == 2
