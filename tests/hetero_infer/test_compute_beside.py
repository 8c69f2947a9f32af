"""The compute plane of a Python engine is started again, later each time, as `serve`'s is."""

from __future__ import annotations

import os
import signal

import pytest

from hetero_infer import EngineConfig, compute_beside
from hetero_infer.compute_beside import ComputeBeside
from hetero_infer.config import child_environment
from hetero_infer.plane_process import PlaneProcess, PlaneStartError
from hetero_infer.restarts import MAX_FAILED_STARTS, STEADY_S
from planes.errors import ExecutionError

PLANE = """
import os, sys
flags = dict(flag.lstrip("-").split("=") for flag in sys.argv[1:])
def say(line):
    os.write(int(flags["ready-fd"]), line)
"""
SERVES = """
say(b"READY 127.0.0.1:5\\n")
os.read(int(flags["lifeline-fd"]), 1)
"""
FAILS = """
print("a frame of it", flush=True)
sys.exit("ValueError: the reason")
"""
SAYS_WHY = """
say(b"FAILED no such device\\n")
sys.exit(1)
"""


class Planes:
    """What starts planes here; `sources` are those of the next ones, the last for all others."""

    def __init__(self, directory) -> None:
        self._directory = directory
        self.sources = [SERVES]
        self.now = 0.0
        self.pauses: list[float] = []

    def start(self, _config, _address, on_output) -> PlaneProcess:
        source = self.sources.pop(0) if len(self.sources) > 1 else self.sources[0]
        name = "serving_plane" if source == SERVES else "failing_plane"
        (self._directory / f"{name}.py").write_text(PLANE + source)
        return PlaneProcess(
            name, [], environ=child_environment(str(self._directory)), on_output=on_output
        )

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now += pause_s


@pytest.fixture
def planes(tmp_path, monkeypatch):
    planes = Planes(tmp_path)
    monkeypatch.setattr(compute_beside, "start_compute_plane", planes.start)
    return planes


@pytest.fixture
def beside(planes):
    beside = ComputeBeside(
        EngineConfig(),
        clock=lambda: planes.now,
        sleep=lambda pause_s: planes.sleep(pause_s),
    )
    yield beside
    beside.close()


def kill(beside: ComputeBeside) -> None:
    os.kill(beside.pid, signal.SIGKILL)
    beside._plane.process.wait()


def test_it_is_replaced_however_often_it_dies_and_later_each_time(planes, beside):
    for _ in range(2 * MAX_FAILED_STARTS):
        kill(beside)
        beside.keep_alive()
        assert beside._plane.is_running
    assert planes.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]


def test_after_one_that_lived_for_long_the_pauses_begin_anew(planes, beside):
    for lived_s in (1.0, 1.0, STEADY_S, 1.0):
        planes.now += lived_s
        kill(beside)
        beside.keep_alive()
    assert planes.pauses == [0.25, 0.5, 0.25, 0.5]


def test_starts_that_fail_are_repeated_and_the_one_that_comes_up_counts_anew(
    planes, beside, capsys
):
    for _ in range(2):
        planes.sources = [FAILS] * (MAX_FAILED_STARTS - 1) + [SERVES]
        kill(beside)
        beside.keep_alive()
        assert beside._plane.is_running
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "hetero_infer: the serving plane was ended by SIGKILL; starting another one",
        "a frame of it",
        "ValueError: the reason",
    ]
    assert sum("ended with status 1" in line for line in lines) == 2 * (MAX_FAILED_STARTS - 1)


def test_starts_in_a_row_that_fail_are_given_up_with_the_last_reason(planes, beside):
    planes.sources = [SAYS_WHY]
    kill(beside)
    for _ in range(2):  # asked once more, it is as true
        with pytest.raises(ExecutionError) as caught:
            beside.keep_alive()
        assert caught.value.message == (
            "5 starts in a row failed: the failing plane ended with status 1: no such device"
        )
        assert len(planes.pauses) == MAX_FAILED_STARTS


def test_one_that_the_machine_cannot_make_is_a_start_that_failed(planes, beside, monkeypatch):
    def no_memory(*_):
        raise PlaneStartError("the compute plane could not be started: Cannot allocate memory")

    monkeypatch.setattr(compute_beside, "start_compute_plane", no_memory)
    kill(beside)
    with pytest.raises(ExecutionError, match=r"^5 starts in a row failed: .* allocate memory$"):
        beside.keep_alive()
    monkeypatch.setattr(compute_beside, "start_compute_plane", planes.start)
    beside.keep_alive()  # now it can
    assert beside._plane.is_running


def test_a_pause_that_is_interrupted_goes_on_when_it_is_asked_again(planes, beside, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    kill(beside)
    with monkeypatch.context() as patch:
        patch.setattr(planes, "sleep", interrupted)
        for _ in range(2 * MAX_FAILED_STARTS):
            with pytest.raises(KeyboardInterrupt):
                beside.keep_alive()
    beside.keep_alive()
    assert beside._plane.is_running
    assert planes.pauses == [0.25]


def test_those_that_die_before_anybody_has_learned_what_they_are_are_given_up(beside):
    for _ in range(MAX_FAILED_STARTS - 1):
        kill(beside)
        beside.keep_alive(is_known=False)
    kill(beside)
    with pytest.raises(ExecutionError, match=r"^5 starts in a row failed: the .* by SIGKILL$"):
        beside.keep_alive(is_known=False)


def test_the_first_one_is_started_once(planes):
    planes.sources = [FAILS]
    with pytest.raises(PlaneStartError, match="ended with status 1"):
        ComputeBeside(EngineConfig())
    assert planes.pauses == []
