from __future__ import annotations

import threading

import pytest

from compute_plane.executor.worker_threads import WorkerThreads


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_tasks", [1, 2, 9])
def test_every_task_runs_once_before_run_returns(num_threads: int, num_tasks: int) -> None:
    done: list[int] = []
    with WorkerThreads(num_threads) as workers:
        for _ in range(20):
            done.clear()
            workers.run([lambda i=i: done.append(i) for i in range(num_tasks)])
            assert sorted(done) == list(range(num_tasks))


def test_tasks_run_side_by_side() -> None:
    meeting = threading.Barrier(3, timeout=30)
    with WorkerThreads(3) as workers:
        workers.run([meeting.wait] * 3)  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_tasks_exception_reaches_the_caller_and_the_threads_live_on(bad: int) -> None:
    def task(i: int) -> None:
        if i == bad:
            raise KeyError(i)

    with WorkerThreads(2) as workers:
        with pytest.raises(KeyError):
            workers.run([lambda i=i: task(i) for i in range(5)])
        done: list[int] = []
        workers.run([lambda: done.append(1), lambda: done.append(2)])
        assert sorted(done) == [1, 2]
