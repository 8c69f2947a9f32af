"""The report of several parts, some of which raise, die or hang: the others are not lost."""

from __future__ import annotations

import json

import pytest

from bench.gpu import __main__ as report
from bench.gpu import part_process, provenance
from bench.gpu.part_process import Part

HERE = "tests.gpu.parts_that_end_badly"


def part(name: str, seconds: float = 60) -> Part:
    return Part(name, f"{HERE}:{name}", seconds)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run parts as on a machine with a device; the exit code and the report."""
    monkeypatch.setattr(report, "why_no_device", lambda: None)
    device = {"name": "none at all", "capability": "9.0"}
    monkeypatch.setattr(provenance, "describe_device", lambda: device)
    monkeypatch.setattr(part_process, "GRACE_S", 0.5)

    def run(*parts: Part, flags: tuple[str, ...] = ()) -> tuple[int, dict]:
        out = tmp_path / "report.json"
        code = report.main(["--out", str(out), *flags], parts)
        return code, json.loads(out.read_text())

    return run


def test_a_part_that_raises_dies_or_hangs_does_not_lose_the_others(run, capsys):
    code, found = run(
        part("finds"), part("raises"), part("dies"), part("hangs", 1.0), part("finds_a_fault")
    )
    assert code == 1
    assert found["engine_steps"] == {"spread": False}
    assert found["kernels"] == {"first": 1, "second": 2}
    # What a part had found before its end is there.
    assert (found["suites"], found["throughput"], found["copy"]) == ({"begun": True}, 3, 7)
    endings = {name: ending["status"] for name, ending in found["parts"].items()}
    assert endings == {
        "finds": "done", "raises": "raised", "dies": "crashed", "hangs": "cut",
        "finds_a_fault": "done",
    }  # fmt: skip
    assert found["failures"] == [
        "raises: raised: ValueError: no",
        "dies: crashed: signal 6",
        "hangs: cut: it took longer than 1 s",
        "a kernel is wrong",
    ]
    assert [(target["name"], target["met"]) for target in found["targets"]] == [
        ("a share", False),
        ("a speed", True),
    ]
    assert "1 of 2 targets missed" in capsys.readouterr().out


def test_a_missed_target_is_no_fault_and_time_that_ran_out_is_one(run):
    code, found = run(part("finds"), part("finds_a_fault"), flags=("--only", "finds", "--spread"))
    assert code == 0
    assert found["engine_steps"] == {"spread": True}
    assert list(found["parts"]) == ["finds"]
    code, found = run(part("finds"), flags=("--seconds", "0"))
    assert code == 1
    assert found["failures"] == ["finds: left out: no time was left"]


def test_every_part_can_be_called():
    for made in report.PARTS:
        module, _, name = made.run.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))
