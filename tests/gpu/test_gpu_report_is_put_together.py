"""The report of several parts, some of which raise, die or hang: the others are not lost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import __main__ as report
from bench.gpu import part_process, provenance
from bench.gpu.part_process import Part
from kernels.cuda.build import toolchain_hash

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


def test_a_part_that_raises_dies_or_hangs_does_not_lose_the_others(run, capsys, tmp_path):
    code, found = run(
        part("finds"), part("raises"), part("dies"), part("hangs", 1.0), part("finds_a_fault")
    )
    assert code == 1
    assert found["engine_steps"] == {"kv_cache_dtype": "auto"}
    assert found["kernels"] == {"first": 1, "second": 2}
    assert found["numerics"] == ["one case", "another case"]
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
    # A terminal that shows the last lines only shows the essence.
    _, _, last = capsys.readouterr().out.partition("== parts\n")
    ended, _, wrong = last.partition("== targets: 1 of 2 missed\n")
    assert [line.split()[:2] for line in ended.splitlines()] == [
        [name, status] for name, status in endings.items()
    ]
    assert wrong.splitlines() == [
        "      0.2 ≤ 0.1    MISSED  a share",
        "        4 ≥ 3      met     a speed",
        "== faults: 4",
        *found["failures"],
        f"report: {tmp_path / 'report.json'}",
    ]


def test_a_missed_target_is_no_fault_and_time_that_ran_out_is_one(run):
    flags = ("--only", "finds", "--kv-cache-dtype", "int8", "--commit", "abc")
    code, found = run(part("finds"), part("finds_a_fault"), flags=flags)
    assert code == 0
    assert found["engine_steps"] == {"kv_cache_dtype": "int8"}
    assert list(found["parts"]) == ["finds"]
    assert found["commit"]
    assert found["machine"]["cores"] > 0
    code, found = run(part("finds"), flags=("--seconds", "0"))
    assert code == 1
    assert found["failures"] == ["finds: left out: no time was left"]


def test_what_a_part_has_found_is_in_a_file_while_it_runs(run, tmp_path):
    run(part("looks_at_its_file"))
    assert json.loads((tmp_path / "report.json").read_text())["copy"] == {
        "files": ["report.looks_at_its_file.json"]
    }
    assert [path.name for path in tmp_path.glob("*.json")] == ["report.json"]


def test_machine_code_made_elsewhere_is_taken_over_where_a_plane_looks_for_it(run, tmp_path):
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "silu.sm_90.0123.4567.cubin").write_bytes(b"code")
    cache = tmp_path / "cache"
    flags = ("--prebuilt", str(carried), "--kernel-cache", str(cache))
    _, found = run(part("finds"), flags=flags)
    assert found["taken_over"] == 1
    (taken,) = (cache / "cuda").iterdir()
    assert taken.name == f"silu.sm_90.0123.{toolchain_hash()}.cubin"


def test_a_missing_package_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "why_no_device", lambda: None)
    monkeypatch.setattr(report, "NEEDED", ("json", "no_such_thing", "no_such_thing.inside"))
    assert report.main(["--out", str(tmp_path / "report.json")]) == 2
    shown = capsys.readouterr()
    assert "lacks no_such_thing, no_such_thing.inside: pip install" in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_every_module_of_others_that_is_imported_is_looked_for_beforehand():
    named = {name.partition(".")[0] for name in report.NEEDED}
    starts = [made.run.partition(":")[0] for made in report.PARTS]
    starts += ["compute_plane.cuda.cuda_driver", "control_plane.app"]
    script = (
        "import importlib, sys\n"
        f"for name in {starts!r}:\n"
        "    importlib.import_module(name)\n"
        f"ours = {OURS!r}\n"
        "for name, module in sys.modules.items():\n"
        "    if name.partition('.')[0] in ours and module.__file__:\n"
        "        print(module.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    imported = {top for file in done.stdout.split() for top in imported_by(Path(file))}
    of_others = imported - set(sys.stdlib_module_names) - set(OURS)
    assert sorted(of_others - named - {"torch", "google"}) == []
    assert len(of_others) > 5


OURS = ("bench", "compute_plane", "control_plane", "hetero_infer", "kernels", "planes", "protos")


def imported_by(file: Path) -> Iterator[str]:
    """Yield what a module imports when it is imported itself, without what lies inside."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Import):
            yield from (name.name.partition(".")[0] for name in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            yield statement.module.partition(".")[0]


def test_every_part_can_be_called():
    for made in report.PARTS:
        module, _, name = made.run.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))
