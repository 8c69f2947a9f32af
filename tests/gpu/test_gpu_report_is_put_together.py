"""The report of several parts, some of which raise, die or hang: the others are not lost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import __main__ as report
from bench.gpu import expected_logits, needed_kernels, part_process, provenance
from bench.gpu.architecture_shapes import SHAPES
from bench.gpu.cases import draw_cases, with_launched
from kernels.cuda import build
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.rms_norm import RmsNormVariant
from tests.gpu.parts_that_end_badly import part


@pytest.mark.wide
def test_a_part_that_raises_dies_or_hangs_does_not_lose_the_others(run, capsys, tmp_path):
    code, found = run(
        part("finds"), part("raises"), part("dies"), part("hangs", 1.0), part("finds_a_fault")
    )
    assert code == 1
    values = {name: part["values"] for name, part in found["parts"].items()}
    assert values == {
        "finds": {"engine_steps": {"kv_cache_dtype": "auto"}, "numerics": ["one case"]},
        "finds_a_fault": {"numerics": ["another case"]},
        # What a part had found before its end is there.
        "raises": {"suites": {"begun": True}}, "dies": {"throughput": 3}, "hangs": {"copy": 7},
    }  # fmt: skip
    endings = {name: part["status"] for name, part in found["parts"].items()}
    assert endings == {
        "finds": "done", "raises": "raised", "dies": "crashed", "hangs": "cut",
        "finds_a_fault": "done",
    }  # fmt: skip
    assert found["failures"] == [
        "raises: raised: ValueError: no, at the third case",
        "dies: crashed: signal 6",
        "hangs: cut: it took longer than 1 s",
        "a kernel is wrong",
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
    assert list(found["parts"]) == ["finds"]
    assert found["parts"]["finds"]["values"]["engine_steps"] == {"kv_cache_dtype": "int8"}
    ran = found["runs"][0]
    assert (ran["commit"], ran["tree_has_changes"]) == ("abc", None)  # git is not asked then
    code, found = run(part("finds"), flags=("--seconds", "0", "--fresh"))
    assert code == 1
    assert found["failures"] == ["finds: left out: no time was left"]


def test_a_folder_for_the_report_is_made(run, tmp_path):
    out = tmp_path / "not" / "there" / "report.json"
    run(part("finds"), out=out)


def test_what_a_part_has_found_is_in_a_file_while_it_runs(run, tmp_path):
    run(part("looks_at_its_file"))
    found = json.loads((tmp_path / "report.json").read_text())
    files = ["report.json", "report.looks_at_its_file.json"]
    assert found["parts"]["looks_at_its_file"]["values"] == {"copy": {"files": files}}
    assert [path.name for path in tmp_path.glob("*.json")] == ["report.json"]


def test_what_a_killed_part_had_in_temporary_files_is_gone(run):
    """A model of 8 B parameters would fill a disk after some runs."""
    _, found = run(part("leaves_a_model"))
    assert found["parts"]["leaves_a_model"]["why"] == "signal 9"
    left = Path(found["parts"]["leaves_a_model"]["values"]["copy"])
    assert not left.exists()
    assert not left.parent.exists()


def test_machine_code_made_elsewhere_is_taken_over_where_a_plane_looks_for_it(
    run, tmp_path, monkeypatch, capfd
):
    silu, norm = GateMulVariant("float32"), RmsNormVariant("float32", 256)
    monkeypatch.setattr(needed_kernels, "built_variants", lambda: [silu, norm])
    carried, cache = tmp_path / "carried", tmp_path / "cache"
    build.store(silu, (9, 0), build.private_directory(carried), b"code")
    (file,) = carried.iterdir()
    file.rename(file.with_name(file.name.replace(build.toolchain_hash(), "4567")))
    answer = [np.arange(3, dtype=np.float32)[None]]
    expected_logits.write(carried, SHAPES[:1], lambda _: answer)
    flags = ("--prebuilt", str(carried), "--kernel-cache", str(cache))
    _, found = run(part("finds"), flags=flags)
    assert build.prebuilt(silu, (9, 0), cache / "cuda") == b"code"
    assert build.is_built(silu, (9, 0), cache / "cuda")
    np.testing.assert_array_equal(expected_logits.read(cache, SHAPES[0]), answer)
    # What it lacks costs a device's minutes: that is said before they are spent.
    assert found["runs"][0]["taken_over"] == 1
    assert found["runs"][0]["not_taken_over"] == [norm.name]
    assert f"elsewhere; 1 that are needed are not among them ({norm.name}" in capfd.readouterr().out


@pytest.mark.wide
def test_what_cases_launch_besides_is_needed_too():
    """On a GPU it would be compiled while the watch of its case runs, and on one core."""
    needed = needed_kernels.needed_variants()
    first_of_each = {type(variant): variant for variant in reversed(needed)}
    cases = [case for variant in first_of_each.values() for case in draw_cases(variant)]
    cases += [case.part[0] for case in cases if case.part is not None]
    launched = {launch.variant for case in cases for launch in case.launches}
    assert launched - set(needed) == set()
    # Of each, not only of the first.
    for variant in needed:
        assert set(with_launched([variant])) <= set(needed)


def test_a_compiler_that_fails_in_any_way_is_one_line_of_the_report(monkeypatch):
    """Bindings that miss a function of an older library raise errors of their own."""

    def compile_ptx(_):
        message = "function nvrtcGetNumSupportedArchs is not found\nand more"
        raise RuntimeError(message)

    monkeypatch.setattr(provenance, "compile_ptx", compile_ptx)
    said = provenance.describe_compiler()
    assert said == "RuntimeError: function nvrtcGetNumSupportedArchs is not found"


def test_a_command_that_does_not_end_is_no_line(monkeypatch):
    monkeypatch.setattr(provenance, "ANSWER_S", 0.01)
    assert provenance._line_of("sleep", "100") is None
    monkeypatch.undo()
    assert provenance._line_of("echo", "a line") == "a line"


def test_a_missing_package_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "why_no_device", lambda: None)
    monkeypatch.setattr(report, "NEEDED", ("json", "no_such_thing", "no_such_thing.inside"))
    assert report.main(["--out", str(tmp_path / "report.json")]) == 2
    shown = capsys.readouterr()
    assert "lacks no_such_thing, no_such_thing.inside: pip install" in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_numbas_own_cuda_in_the_place_of_numba_cudas_is_told(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "why_no_device", lambda: None)
    assert report.takes_numba_cuda()
    redirecting = [finder for finder in sys.meta_path if "Numba" in type(finder).__name__]
    monkeypatch.setattr(
        sys, "meta_path", [finder for finder in sys.meta_path if finder not in redirecting]
    )
    monkeypatch.delitem(sys.modules, "numba.cuda", raising=False)
    assert report.main(["--out", str(tmp_path / "report.json")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("numba.cuda is numba's own for ")
    assert "PYTHONPATH" in shown


def test_packages_that_do_not_go_together_are_told_before_a_part_is_run(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / "made_for_others.py").write_text("raise RuntimeError('grpcio is too old\\nhere')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(report, "why_no_device", lambda: None)
    monkeypatch.setattr(report, "STARTS", ("made_for_others",))
    assert report.main(["--out", str(tmp_path / "report.json")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("made_for_others cannot be imported by ")
    assert shown.endswith(": RuntimeError: grpcio is too old\n")


def test_a_part_that_loses_the_device_goes_on_behind_what_lost_it(run):
    code, found = run(part("loses_the_device_twice"))
    assert code == 1
    made = found["parts"]["loses_the_device_twice"]
    assert made["status"] == "done"
    assert made["values"] == {"numerics": ["a", "c", "e"], "kernels": {"a": 0, "c": 2, "e": 4}}
    assert found["failures"] == ["b: the device was lost", "d: the device was lost"]


def test_a_device_that_is_lost_again_and_again_ends_the_part(run, monkeypatch):
    monkeypatch.setattr(part_process, "MOST_PROCESSES", 2)
    _, found = run(part("loses_the_device_twice"))
    made = found["parts"]["loses_the_device_twice"]
    assert (made["status"], made["go_on_at"]) == ("unfinished", 4)
    assert made["why"] == "the device was lost too often"


def test_a_first_one_that_takes_long_before_it_keeps_the_others_from_nothing(run):
    """As where a compiler is waited for once."""
    _, found = run(part("waits_before_a", 10.0))
    made = found["parts"]["waits_before_a"]
    assert (made["status"], made["values"]) == ("done", {"numerics": ["a", "b", "c", "d", "e"]})


def test_a_part_that_is_cut_off_is_gone_on_with_from_what_was_under_way(run):
    _, found = run(part("waits_for_ever_at_b", 0.5))
    made = found["parts"]["waits_for_ever_at_b"]
    assert (made["status"], made["go_on_at"]) == ("cut", 1)
    assert made["values"] == {"numerics": ["a"]}


def test_what_does_not_end_is_named_and_the_others_are_done(run):
    _, found = run(part("waits_for_ever_at_b"))
    assert found["parts"]["waits_for_ever_at_b"]["values"] == {"numerics": ["a", "c"]}
    assert found["failures"] == ["b: not done in 1 s"]


def test_a_figure_that_json_does_not_have_is_a_word(run):
    _, found = run(part("finds_infinity"))
    assert found["parts"]["finds_infinity"]["values"] == {"numerics": [{"error": "inf"}, "nan"]}


@pytest.mark.wide
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
