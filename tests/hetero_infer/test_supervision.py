"""A plane that ends is started again, later each time, unless it cannot be started at all."""

from __future__ import annotations

import errno
import itertools
from queue import SimpleQueue

import pytest

from hetero_infer.config import child_environment
from hetero_infer.plane_process import PlaneProcess, PlaneStartError
from hetero_infer.restarts import MAX_FAILED_STARTS, STEADY_S
from hetero_infer.supervision import SupervisedPlane
from planes.errors import ExecutionError

PATIENCE_S = 120.0
NUMBERS = itertools.count(1)


@pytest.fixture
def said():
    """What is said of planes."""
    return []


PLANE = """
import os, sys
ready = int(next(flag for flag in sys.argv if flag.startswith("--ready-fd=")).partition("=")[2])
os.write(ready, {said!r})
sys.exit({status})
"""

SERVES = b"READY 127.0.0.1:5\n"


@pytest.fixture
def supervise(tmp_path, said):
    """Supervise a plane that says something and ends; its clock is a list of one number."""
    made = []

    def make(status: int, says: bytes = b""):
        now, ended = [0.0], SimpleQueue()

        def start() -> PlaneProcess:
            made.append(PlaneProcess("ending_plane", [], environ=child_environment(str(tmp_path))))
            return made[-1]

        from_now_on(tmp_path, status, says)
        supervised = SupervisedPlane(start, ended, said.append, clock=lambda: now[0])
        supervised.start()
        return supervised, ended, now

    yield make
    for process in made:
        process.stop()


def from_now_on(directory, status: int, says: bytes = b"") -> None:
    """Let planes of this directory end with this status after these words."""
    source = PLANE.format(said=says, status=status)
    # Each of another size: bytecode, which may be kept, is told apart by that and by the second.
    (directory / "ending_plane.py").write_text(source + "#" * next(NUMBERS))


def end(supervised, ended) -> None:
    assert ended.get(timeout=PATIENCE_S) is supervised.process
    supervised.note_end()


def start_the_next(supervised, now) -> None:
    now[0] = supervised.due_at
    supervised.start_if_due()


def test_one_that_never_serves_is_started_again_later_each_time_and_given_up_in_the_end(
    supervise, said
):
    supervised, ended, now = supervise(3)
    pauses = []
    for _ in range(MAX_FAILED_STARTS - 1):
        end(supervised, ended)
        pauses.append(supervised.due_at - now[0])
        before = supervised.process
        supervised.start_if_due()
        assert supervised.process is before  # not yet
        start_the_next(supervised, now)
        assert supervised.process is not before
    assert pauses == [0.25, 0.5, 1.0, 2.0]
    with pytest.raises(ExecutionError) as caught:
        end(supervised, ended)
    assert caught.value.message == (
        "5 starts in a row failed: the ending plane ended with status 3"
    )
    assert [line for line in said if "pid" not in line] == [
        "the ending plane ended with status 3; starting another one"
    ] * 4


def test_one_that_serves_before_it_ends_is_started_again_however_often(supervise):
    supervised, ended, now = supervise(3, SERVES)
    pauses = []
    for _ in range(2 * MAX_FAILED_STARTS):
        end(supervised, ended)
        pauses.append(supervised.due_at - now[0])
        start_the_next(supervised, now)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]


def test_only_starts_in_a_row_that_failed_make_it_given_up(supervise, tmp_path):
    supervised, ended, now = supervise(3, SERVES)
    for _ in range(2):
        end(supervised, ended)
        from_now_on(tmp_path, 4)
        for _ in range(MAX_FAILED_STARTS - 1):
            start_the_next(supervised, now)
            end(supervised, ended)
        from_now_on(tmp_path, 3, SERVES)
        start_the_next(supervised, now)


def test_what_a_plane_says_of_why_it_cannot_serve_is_told(supervise, said):
    supervised, ended, now = supervise(1, b"FAILED there is no such device\n")
    for _ in range(MAX_FAILED_STARTS - 1):
        end(supervised, ended)
        why = "the ending plane ended with status 1: there is no such device"
        assert said[-1] == f"{why}; starting another one"
        start_the_next(supervised, now)
    with pytest.raises(ExecutionError, match=f"^5 starts in a row failed: {why}$"):
        end(supervised, ended)


def test_one_that_the_machine_cannot_make_now_is_tried_again_and_given_up_in_the_end(
    supervise, said, monkeypatch
):
    supervised, ended, now = supervise(3, SERVES)
    end(supervised, ended)

    def no_memory(*_args, **_options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("hetero_infer.plane_process.subprocess.Popen", no_memory)
        start_the_next(supervised, now)
    assert "could not be started: Cannot allocate memory; starting another one" in said[-1]
    assert supervised.due_at == now[0] + 0.5
    assert supervised.stop(0.0) == 0  # nothing runs
    supervised.due_at = now[0]
    supervised.start_if_due()
    end(supervised, ended)
    monkeypatch.setattr("hetero_infer.plane_process.subprocess.Popen", no_memory)
    for _ in range(MAX_FAILED_STARTS - 1):
        start_the_next(supervised, now)
    now[0] = supervised.due_at
    with pytest.raises(ExecutionError, match=r"^5 starts in a row failed: .* not be started: "):
        supervised.start_if_due()


def test_one_that_no_thread_can_watch_is_ended_and_tried_again(supervise, said, monkeypatch):
    supervised, ended, now = supervise(3)
    end(supervised, ended)

    def no_thread(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        start_the_next(supervised, now)
    assert "could not be started: can't start new thread; starting another one" in said[-1]
    assert supervised.process.process.returncode is not None
    start_the_next(supervised, now)
    end(supervised, ended)


def test_after_one_that_served_for_long_the_pauses_begin_anew(supervise):
    supervised, ended, now = supervise(3, SERVES)
    for pause_s in (0.25, 0.5, 1.0):
        end(supervised, ended)
        assert supervised.due_at == now[0] + pause_s
        start_the_next(supervised, now)
    now[0] += STEADY_S
    end(supervised, ended)
    assert supervised.due_at == now[0] + 0.25


def test_one_whose_configuration_is_wrong_is_not_started_again(supervise):
    supervised, ended, _ = supervise(2, b"FAILED no such file\n")
    with pytest.raises(PlaneStartError) as caught:
        end(supervised, ended)
    assert caught.value.exit_status == 2
    assert caught.value.message == "the ending plane ended with status 2: no such file"


def test_one_that_has_served_and_finds_its_port_taken_is_tried_again(supervise, said, tmp_path):
    supervised, ended, now = supervise(3, SERVES)
    end(supervised, ended)
    from_now_on(tmp_path, 2)
    for _ in range(MAX_FAILED_STARTS - 1):
        start_the_next(supervised, now)
        end(supervised, ended)
        assert "ended with status 2; starting another one" in said[-1]
    start_the_next(supervised, now)
    with pytest.raises(ExecutionError, match=r"^5 starts in a row failed: .* with status 2$"):
        end(supervised, ended)


def test_one_that_is_stopped_before_its_time_has_come_is_not_started(supervise):
    supervised, ended, now = supervise(3)
    end(supervised, ended)
    assert supervised.stop(1.0) == 0
    now[0] += 99.0
    supervised.start_if_due()
    assert not supervised.process.is_running
