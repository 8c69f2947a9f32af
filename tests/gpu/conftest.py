"""What tests of the report share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import __main__ as report
from bench.gpu import part_process, provenance
from bench.gpu.part_process import Part


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run parts as on a machine with a device; the exit code and the report."""
    monkeypatch.setattr(report, "why_no_device", lambda: None)
    device = {"name": "none at all", "capability": "9.0"}
    monkeypatch.setattr(provenance, "describe_device", lambda: device)
    # The compiler takes seconds to say that it works.
    monkeypatch.setattr(provenance, "describe_compiler", lambda: "works")
    monkeypatch.setattr(part_process, "GRACE_S", 0.5)

    def run(
        *parts: Part, flags: tuple[str, ...] = (), out: Path = tmp_path / "report.json"
    ) -> tuple[int, dict]:
        code = report.main(["--out", str(out), *flags], parts)
        found = json.loads(out.read_text())
        assert found["runs"][-1]["machine"]["cores"] > 0
        return code, found

    run.out = tmp_path / "report.json"
    return run
