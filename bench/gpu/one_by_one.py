"""Cases or shapes of a part, one after the other: none that fails takes the others with it.

One that raises is a fault of its name. One that leaves the device unusable, as an access out of
bounds does, or that does not end, is a fault too, and what is behind it is done by another process,
which `part_process` starts. What there is no time for is left to a report that is continued.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from bench.gpu.findings import Findings, PartOptions

EXIT_GOES_ON: Final = 71
"""Exit status of a process whose part is to be gone on with in another one."""
EACH_S: Final = 30.0
"""What each may take. They take less than a second, once their kernels are compiled."""

T = TypeVar("T")


class DeviceLostError(Exception):
    """The device answers this process no more; `Findings.go_on_at` says where to go on."""


def one_by_one(
    found: Findings,
    options: PartOptions,
    things: Sequence[T],
    name_of: Callable[[T], str],
    do: Callable[[T], None],
    before: Callable[[int], None] | None = None,
) -> None:
    """Do each thing from `options.begin_at` on, as long as there is time.

    `before`: called with its number before each, and may take longer than a thing may, the first
    time most of all: others are not held to take as long. Raises DeviceLostError behind a thing
    that has lost the device. Who is cut off is gone on with from what was under way.
    """
    slowest = 0.0
    for number in range(options.begin_at, len(things)):
        began = time.monotonic()
        found.go_on_at = number
        if began + slowest > options.ends:
            found.say(f"no time was left for {len(things) - number} of {len(things)}")
            return
        if before is not None:
            before(number)
        if number == options.begin_at:
            began = time.monotonic()
        name = name_of(things[number])
        with found.attempt(name), _watched(found, name, number):
            do(things[number])
        if device_is_lost():
            found.failures.append(f"{name}: the device was lost")
            found.go_on_at = number + 1
            raise DeviceLostError
        slowest = max(slowest, time.monotonic() - began)
    found.go_on_at = None


@contextmanager
def _watched(found: Findings, name: str, number: int) -> Iterator[None]:
    """End this process if something is not done in time: a kernel may wait for ever."""

    def give_up() -> None:
        found.failures.append(f"{name}: not done in {EACH_S:.0f} s")
        found.go_on_at = number + 1
        found.say(found.failures[-1])
        os._exit(EXIT_GOES_ON)

    timer = threading.Timer(EACH_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def device_is_lost() -> bool:
    """Whether an earlier launch has left this process without its device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return True
    return False
