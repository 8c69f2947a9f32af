"""A plane that ends is started again, later each time, until that is of no use."""

from __future__ import annotations

import errno
from queue import SimpleQueue

import pytest

from hetero_infer.config import child_environment
from hetero_infer.plane_process import PlaneProcess, PlaneStartError
from hetero_infer.supervision import MAX_RESTARTS, STEADY_S, SupervisedPlane
from planes.errors import ExecutionError

PATIENCE_S = 120.0


@pytest.fixture
def said():
    """What is said of planes."""
    return []


@pytest.fixture
def supervise(tmp_path, said):
    """Supervise a plane that ends with a status at once; its clock is a list of one number."""
    made = []

    def make(status: int):
        name = f"plane_that_ends_with_{status}"
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit({status})")
        now, ended = [0.0], SimpleQueue()

        def start() -> PlaneProcess:
            made.append(PlaneProcess(name, [], environ=child_environment(str(tmp_path))))
            return made[-1]

        supervised = SupervisedPlane(
            start, ended, said.append, first_pause_s=1.0, clock=lambda: now[0]
        )
        supervised.start()
        return supervised, ended, now

    yield make
    for process in made:
        process.stop()


def end(supervised, ended) -> None:
    assert ended.get(timeout=PATIENCE_S) is supervised.process
    supervised.note_end()


def test_it_is_started_again_later_each_time_and_given_up_in_the_end(supervise, said):
    supervised, ended, now = supervise(3)
    pauses = []
    for _ in range(MAX_RESTARTS):
        end(supervised, ended)
        pauses.append(supervised.due_at - now[0])
        before = supervised.process
        supervised.start_if_due()
        assert supervised.process is before  # not yet
        now[0] = supervised.due_at
        supervised.start_if_due()
        assert supervised.process is not before
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0]
    with pytest.raises(ExecutionError, match=f"ended with status 3; {MAX_RESTARTS} restarts did"):
        end(supervised, ended)
    assert sum("ended with status 3; starting another one" in line for line in said) == 5


def test_one_that_the_machine_cannot_make_now_is_tried_again_and_given_up_in_the_end(
    supervise, said, monkeypatch
):
    supervised, ended, now = supervise(3)
    end(supervised, ended)

    def no_memory(*_args, **_options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("hetero_infer.plane_process.subprocess.Popen", no_memory)
        now[0] = supervised.due_at
        supervised.start_if_due()
    assert "could not be started: Cannot allocate memory; starting another one" in said[-1]
    assert supervised.due_at == now[0] + 2.0
    assert supervised.stop(0.0) == 0  # nothing runs
    supervised.due_at = now[0]
    supervised.start_if_due()
    end(supervised, ended)
    monkeypatch.setattr("hetero_infer.plane_process.subprocess.Popen", no_memory)
    for _ in range(MAX_RESTARTS - 3):
        now[0] = supervised.due_at
        supervised.start_if_due()
    now[0] = supervised.due_at
    with pytest.raises(ExecutionError, match=f"not be started: .*; {MAX_RESTARTS} restarts did"):
        supervised.start_if_due()


def test_one_that_no_thread_can_watch_is_ended_and_tried_again(supervise, said, monkeypatch):
    supervised, ended, now = supervise(3)
    end(supervised, ended)

    def no_thread(_thread):
        raise RuntimeError("can't start new thread")

    now[0] = supervised.due_at
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        supervised.start_if_due()
    assert "could not be started: can't start new thread; starting another one" in said[-1]
    assert supervised.process.process.returncode is not None
    now[0] = supervised.due_at
    supervised.start_if_due()
    end(supervised, ended)


def test_one_that_ran_for_long_begins_to_count_anew(supervise):
    supervised, ended, now = supervise(3)
    for _ in range(MAX_RESTARTS + 2):
        now[0] += STEADY_S
        end(supervised, ended)
        assert supervised.due_at == now[0] + 1.0
        now[0] += 1.0
        supervised.start_if_due()


def test_one_whose_configuration_is_wrong_is_not_started_again(supervise):
    supervised, ended, _ = supervise(2)
    with pytest.raises(PlaneStartError) as caught:
        end(supervised, ended)
    assert caught.value.exit_status == 2


def test_one_that_has_served_and_finds_its_port_taken_is_tried_again(supervise, said, tmp_path):
    supervised, ended, now = supervise(3)
    end(supervised, ended)
    # Of another size: its bytecode, which may be kept, is told apart by that and by the second.
    (tmp_path / "plane_that_ends_with_3.py").write_text("raise SystemExit(2)  # from now on")
    for _ in range(MAX_RESTARTS - 1):
        now[0] = supervised.due_at
        supervised.start_if_due()
        end(supervised, ended)
        assert "ended with status 2; starting another one" in said[-1]
    now[0] = supervised.due_at
    supervised.start_if_due()
    with pytest.raises(ExecutionError, match=f"ended with status 2; {MAX_RESTARTS} restarts did"):
        end(supervised, ended)


def test_one_that_is_stopped_before_its_time_has_come_is_not_started(supervise):
    supervised, ended, now = supervise(3)
    end(supervised, ended)
    assert supervised.stop(1.0) == 0
    now[0] += 99.0
    supervised.start_if_due()
    assert not supervised.process.is_running
