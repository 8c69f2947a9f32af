"""Threads that share the kernels' work with the device thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType


class WorkerThreads:
    """`num_threads` − 1 threads beside the caller's own.

    Tasks must release the GIL where they work (kernels and BLAS do) and write to disjoint places.
    Every thread takes the next task when it is done with one, so with more tasks than threads a
    thread that another process keeps from its core costs little.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = (
            ThreadPoolExecutor(num_threads - 1, thread_name_prefix="kernel")
            if num_threads > 1
            else None
        )

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks, also on the calling thread, and return when all are done.

        An exception of a task is raised here, after the other threads have stopped taking tasks.
        """
        if self._pool is None or len(tasks) == 1:
            for task in tasks:
                task()
            return
        left = iter(tasks)  # stepping a list's iterator is atomic

        def work() -> None:
            for task in left:
                task()

        futures = [self._pool.submit(work) for _ in range(min(self.num_threads, len(tasks)) - 1)]
        try:
            work()
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> WorkerThreads:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
