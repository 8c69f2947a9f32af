"""Many operations at once: loaded from where they are kept, or compiled on all cores.

A first start needs some fifteen, of half a second to five each, and the compiler uses one core. So
several processes compile (`compile_worker`); this one takes what they make, and never has to import
the compiler itself.
"""

from __future__ import annotations

import contextlib
import selectors
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kernels.cpu.compile_worker import Worker
from kernels.cpu.operation import Operation

MAX_WORKERS: Final = 8
"""The longest operation takes as long as a fifth of all."""
WORKER_BYTES: Final = 400 << 20
"""Memory that there should be for each: it imports the compiler for itself and holds 285 MB."""
LEAST_FOR_WORKERS: Final = 4
"""Operations that are worth it: to start one takes as long as the compiler's import."""
LONGEST: Final = ("sampling.", "attention.")
"""What operations begin with that take longest: begun last, they would be waited for."""


def load_all(operations: Iterable[Operation], num_processes: int) -> None:
    """Load operations; those whose machine code is not kept are compiled. Raises as loading one.

    By up to `num_processes`, or by this one.
    """
    missing = [one for one in dict.fromkeys(operations) if not one.load_kept()]
    num_workers = min(num_processes, MAX_WORKERS, len(missing))
    if num_workers > 1 and len(missing) >= LEAST_FOR_WORKERS:
        ordered = sorted(missing, key=lambda one: not one.name.startswith(LONGEST))
        for one, code in compile_aside(ordered, num_workers):
            one.take(code)
    for one in missing:
        _ = one.address  # what no process has made is made here, or says why it cannot be


def compile_aside(
    operations: Sequence[Operation], num_workers: int
) -> Iterator[tuple[Operation, bytes]]:
    """Yield operations and their object files as processes make them.

    Not of what a process ended at, nor of anything where none can be started. What another plane
    has kept meanwhile is loaded instead.
    """
    left = deque(operations)
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())

        def begin_next(worker: Worker) -> None:
            while left and left[0].load_kept():
                left.popleft()
            if left and worker.begin(left[0].name):
                selector.register(worker.output, selectors.EVENT_READ, (worker, left.popleft()))

        with contextlib.suppress(OSError):  # no more processes, or no memory for one
            for _ in range(num_workers):
                begin_next(stack.enter_context(Worker()))
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fd)
                worker, one = key.data
                code = worker.result()
                if code is not None:
                    yield one, code
                    begin_next(worker)
