"""Which parts a command runs, and what becomes of a report that is there already."""

from __future__ import annotations

import json

import pytest

from bench.gpu import __main__ as report
from bench.gpu import provenance
from bench.gpu.report import REPORT_VERSION
from tests.gpu.parts_that_end_badly import part


@pytest.mark.parametrize(
    "flags", [("--only", "finds_a_fault,finds"), ("--only", "finds_a_fault", "--only", "finds")]
)
def test_parts_run_in_the_order_in_which_they_are_named(run, flags):
    """Minutes of a device go to what is asked for first."""
    _, found = run(part("finds"), part("raises"), part("finds_a_fault"), flags=flags)
    assert list(found["parts"]) == ["finds_a_fault", "finds"]


def test_a_part_that_is_named_twice_runs_once_and_one_that_is_not_there_is_told(run, capsys):
    _, found = run(part("finds"), flags=("--only", "finds,finds"))
    assert found["parts"]["finds"]["values"]["numerics"] == ["one case"]
    with pytest.raises(SystemExit, match="2"):
        report.main(["--out", str(run.out), "--only", "finds,found"], (part("finds"),))
    assert "no part 'found'; there is finds" in capsys.readouterr().err


def test_a_report_is_not_begun_anew_unless_that_is_asked_for(run, capsys):
    """It may be of minutes on a machine that is gone."""
    run(part("finds"))
    before = run.out.read_text()
    assert report.main(["--out", str(run.out)], (part("finds_a_fault"),)) == 2
    said = f"{run.out} has parts: --continue goes on from it, --fresh begins anew\n"
    assert capsys.readouterr().err == said
    assert run.out.read_text() == before
    _, found = run(part("finds_a_fault"), flags=("--fresh",))
    assert (list(found["parts"]), len(found["runs"])) == (["finds_a_fault"], 1)


def test_a_report_without_parts_is_no_loss(run):
    run()
    code, found = run(part("finds"))
    assert (code, list(found["parts"])) == (0, ["finds"])


@pytest.mark.parametrize("content", ['{"report_version": 3}', "no report", "[]"])
@pytest.mark.parametrize("flags", [(), ("--continue",)])
def test_a_file_that_is_no_such_report_is_kept(run, capsys, content, flags):
    run.out.write_text(content)
    assert report.main(["--out", str(run.out), *flags], (part("finds"),)) == 2
    said = f"{run.out} is no report of version {REPORT_VERSION}: --fresh begins anew\n"
    assert capsys.readouterr().err == said
    assert run.out.read_text() == content
    run(part("finds"), flags=("--fresh",))


def test_what_a_part_has_found_stays_where_going_on_has_no_time_for_it(run):
    run(part("raises"))
    code, found = run(part("raises"), flags=("--continue", "--seconds", "0"))
    assert code == 1
    assert found["parts"]["raises"]["values"] == {"suites": {"begun": True}}
    assert found["failures"] == ["raises: raised: ValueError: no, at the third case"]


def test_a_continued_report_keeps_what_is_done_and_goes_on_where_time_was_over(run):
    parts = (part("finds"), part("comes_half_way"), part("raises"))
    _, first = run(*parts)
    halfway = first["parts"]["comes_half_way"]
    assert (halfway["status"], halfway["why"]) == ("unfinished", "no time was left")
    assert halfway["values"] == {"numerics": ["a", "b"]}
    first["parts"]["finds"]["values"] = {"copy": "kept"}
    run.out.write_text(json.dumps(first))

    code, second = run(*parts, flags=("--continue",))
    assert code == 1
    assert len(second["runs"]) == 2
    kept, halfway, again = second["parts"].values()
    assert kept["values"] == {"copy": "kept"}
    assert halfway["values"] == {"numerics": ["a", "b", "c", "d", "e"]}
    assert [made["run"] for made in (kept, halfway, again)] == [0, 1, 1]
    # Not twice: what a part that is run again had found is replaced.
    assert second["failures"] == ["raises: raised: ValueError: no, at the third case"]

    _, third = run(*parts, flags=("--continue", "--only", "finds"))
    assert third["parts"]["finds"]["values"] != {"copy": "kept"}
    assert third["parts"]["comes_half_way"] == halfway


def test_a_report_that_is_not_there_is_begun_and_that_is_said(run, capfd):
    code, found = run(part("finds"), flags=("--continue",))
    assert (code, len(found["runs"])) == (0, 1)
    assert "report.json is not there: nothing to go on from" in capfd.readouterr().out


def test_a_report_of_another_device_is_not_continued(run, monkeypatch, capsys):
    run(part("finds"))
    device = {"name": "another", "capability": "8.0"}
    monkeypatch.setattr(provenance, "describe_device", lambda: device)
    before = run.out.read_text()
    assert report.main(["--out", str(run.out), "--continue"], (part("finds"),)) == 2
    assert "is of another device: none at all" in capsys.readouterr().err
    assert run.out.read_text() == before
