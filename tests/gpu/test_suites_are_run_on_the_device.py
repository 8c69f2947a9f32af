"""The report's run of the black-box tests: in which order, within its time, and what is a fault."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import suites
from bench.gpu.findings import Findings, PartOptions
from bench.gpu.suites import counted, run_suites


def within(seconds: float) -> PartOptions:
    return PartOptions(Path("not used"), seconds)


@pytest.mark.wide
def test_suites_that_do_not_run_are_faults():
    found = Findings()
    golden = "tests/golden/test_formats_keep_their_accuracy.py"
    folders, choices = [golden, "tests/not_there"], {"": "not slow"}
    run_suites(found, folders, ["--device=cuda:4095"], within(600), choices)
    counts = found.values["suites"][golden]
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (0, 0, 2)
    assert found.failures == [
        f"{golden}: every test was skipped",
        "tests/not_there: pytest ended with status 4",
    ]


class SlowTests:
    """Plays a pytest that goes on until it is interrupted, and writes its report then."""

    def __init__(self, command, **_):
        (self.report,) = (Path(a.partition("=")[2]) for a in command if "--junitxml=" in a)
        self.status = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.status is not None

    def wait(self, seconds):
        if self.status is None:
            raise subprocess.TimeoutExpired("pytest", seconds)
        return self.status

    def send_signal(self, number):
        assert number == signal.SIGINT
        self.report.write_text('<testsuite><testcase classname="a" name="right"/></testsuite>')
        self.status = 2


def test_a_suite_whose_time_is_over_is_counted_and_is_where_another_run_begins(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", SlowTests)
    found = Findings()
    run_suites(
        found, ["tests/done", "tests/long", "tests/later"], [], replace(within(60), begin_at=1)
    )
    assert found.values["suites"]["tests/long"]["passed"] == 1
    assert list(found.values["suites"]) == ["tests/long"]
    assert (found.failures, found.doing, found.go_on_at) == ([], "tests/long", 1)

    found = Findings()
    run_suites(found, ["tests/later"], [], within(1))
    assert (found.values, found.doing, found.go_on_at) == ({"suites": {}}, "tests/later", 0)


class PlayedTests:
    """Plays a pytest that ends at once.

    `skipping`: folder and choice of runs whose only test is skipped, `without`: that have none;
    `hanging`: that do not end until they are interrupted. `ran`: of all.
    """

    ran: list[tuple[str, str]]
    skipping: set[tuple[str, str]]
    without: set[tuple[str, str]]
    hanging: set[tuple[str, str]]

    def __init__(self, command, **_):
        (folder,) = (a for a in command if a.startswith("tests/"))
        self.run = folder, command[command.index("-m", command.index("pytest")) + 1]
        self.ran.append(self.run)
        (report,) = (Path(a.partition("=")[2]) for a in command if "--junitxml=" in a)
        skip = "<skipped>x</skipped>" if self.run in self.skipping else ""
        case = "" if self.run in self.without else f'<testcase name="a">{skip}</testcase>'
        report.write_text(f"<testsuite>{case}</testsuite>")
        self.waits = self.run in self.hanging

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, seconds):
        if self.waits:
            raise subprocess.TimeoutExpired("pytest", seconds)
        return 5 if self.run in self.without else 0

    def send_signal(self, _):
        self.waits = False


@pytest.fixture
def played(monkeypatch):
    for name in ("skipping", "without", "hanging"):
        monkeypatch.setattr(PlayedTests, name, set(), raising=False)
    monkeypatch.setattr(PlayedTests, "ran", [], raising=False)
    monkeypatch.setattr(subprocess, "Popen", PlayedTests)
    monkeypatch.setattr(suites, "FOLDERS", ("tests/a", "tests/b"))
    return PlayedTests


CHEAP = "not wide and not slow and not gpu"
WIDE = "wide and not slow and not gpu"


def test_the_cheap_tests_of_all_folders_come_before_the_wide_ones_of_any(played):
    found = Findings()
    suites.suites(found, within(60))
    assert played.ran == [(f"tests/{x}", choice) for choice in (CHEAP, WIDE) for x in "ab"]
    assert list(found.values["suites"]) == ["tests/a", "tests/b", "tests/a, wide", "tests/b, wide"]
    assert (found.failures, found.go_on_at) == ([], None)


def test_wide_tests_that_there_is_no_time_for_are_where_another_run_begins(played):
    played.hanging.add(("tests/a", WIDE))
    found = Findings()
    suites.suites(found, within(60))
    assert (found.doing, found.go_on_at) == ("tests/a, wide", 2)
    played.hanging.clear()
    played.ran.clear()
    suites.suites(found, replace(within(60), begin_at=2))
    assert played.ran == [("tests/a", WIDE), ("tests/b", WIDE)]


def test_a_folder_is_at_fault_only_if_nothing_of_it_runs(played):
    """No cheap test of `tests/faults` depends on the device: on a GPU all of them are skipped."""
    played.skipping.update({("tests/a", CHEAP), ("tests/b", CHEAP), ("tests/b", WIDE)})
    found = Findings()
    suites.suites(found, within(60))
    assert found.failures == ["tests/b: every test was skipped"]
    played.skipping.clear()
    played.without.update({("tests/a", WIDE), ("tests/b", CHEAP), ("tests/b", WIDE)})
    found = Findings()
    suites.suites(found, within(60))
    assert found.failures == ["tests/b: every test was skipped"]


@pytest.mark.wide
@pytest.mark.parametrize("has_workers", [True, False])
def test_a_file_that_lacks_a_package_or_a_plugin_of_others_takes_no_test_along(
    tmp_path, monkeypatch, has_workers
):
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--device')\n"
    )
    (tmp_path / "test_lacks.py").write_text("import no_such_package\n")
    (tmp_path / "test_right.py").write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(suites, "FOLDERS", (str(tmp_path),))
    if not has_workers:
        monkeypatch.setattr(suites.importlib.util, "find_spec", lambda _: None)
    # A plugin that this machine happens to have, and that takes every run down.
    info = tmp_path / "site" / "others-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: others\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pytest11]\nothers = no_such_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    found = Findings()
    suites.suites(found, within(120))
    counts = found.values["suites"][str(tmp_path)]
    assert (counts["passed"], counts["failed"]) == (1, 1)
    (failure,) = found.failures
    assert "test_lacks" in failure


def test_a_suite_is_counted_and_what_failed_is_named():
    report = """<testsuites><testsuite>
        <testcase classname="a" name="right"/>
        <testcase classname="a" name="wrong"><failure>x</failure></testcase>
        <testcase classname="b" name="broken"><error>x</error></testcase>
        <testcase classname="b" name="not here"><skipped>no GPU</skipped></testcase>
    </testsuite></testsuites>"""
    counts = counted(report)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 2, 1)
    assert counts["failed_tests"] == ["a::wrong", "b::broken"]
