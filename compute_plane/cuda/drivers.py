"""Streams, events, copies and graphs of a device: what the executor asks of torch's runtime.

There are two streams. Everything is queued on the *compute* stream in the order it is asked for,
inputs of a step included; results go back on the *copy* stream, behind what was queued for compute
by then, so that the next step need not wait for them:

    compute   │ inputs n │ step n          │ inputs n+1 │ step n+1        │
    copy                                   │ results n │                  │ results n+1 │
    host      writes n+1 ─────────────────▶  reads n ─▶

On a CPU everything is done when a call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Whether the device has come so far."""
        ...

    def wait(self) -> None:
        """Wait until it has; from any thread. Raises what the device reports of a failed step."""
        ...


class Graph(Protocol):
    """Queued work that can be queued again as one."""

    def replay(self) -> None:
        """Queue it on the compute stream. Raises RuntimeError."""
        ...

    def release(self) -> None:
        """Give back its memory; it cannot be replayed any more."""
        ...


class Driver(Protocol):
    """The runtime of one device. Called by one thread, the device thread."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        ...

    @property
    def has_graphs(self) -> bool:
        """Whether the device profits from graphs."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return uint8 host memory [num_bytes] that the device can copy from and to by itself."""
        ...

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Return uint8 device memory [num_bytes]."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Make the compute stream the current one, for everything that is queued inside."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host buffers and device memory, either way, on the compute stream.

        Host memory is not to be touched until the device has come so far.
        """
        ...

    def copy_part(
        self, target: Tensor, first: int, source: Tensor, begin: int, num_bytes: int
    ) -> None:
        """Queue the copy of `num_bytes` of `source`, from byte `begin` on, to byte `first` on.

        As `copy`, or within the device; both are contiguous. For every step: it makes no tensors.
        """
        ...

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        """Queue a copy to host memory behind all compute queued so far; return when it is there.

        Both are contiguous. `source` must not be written before the event, `target` not be read;
        the event keeps `source`. `is_watched`: who waits for it looks again and again, instead of
        having the device wake him.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, then capture what it queues. Raises RuntimeError."""
        ...

    def total_bytes(self) -> int:
        """Return the device's memory; 0 where the device has none of its own."""
        ...

    def free_bytes(self) -> int | None:
        """Return the device memory that nobody holds; None where the device has none of its own.

        What a step has used stays held, for the next one, until `release_unused`: so it is what the
        largest step so far has left.
        """
        ...

    def held_bytes(self) -> int:
        """Return the device memory that is held for tensors and graphs of this process.

        Whatever others on the device take or give back meanwhile.
        """
        ...

    def release_unused(self) -> None:
        """Give back the device memory that is held and in which no tensor lies."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that is queued."""
        ...


def part_of(tensor: Tensor, first: int, num_bytes: int) -> Tensor:
    """Return some bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)[first : first + num_bytes]


class _Done:
    """An event of a device that does everything at once."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing is left to wait for."""


class CpuDriver:
    """torch's CPU device: every call is done when it returns, and there are no graphs."""

    has_graphs = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Return plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def computing(self) -> AbstractContextManager[object]:
        """Do nothing: there is one stream."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def copy_part(
        self, target: Tensor, first: int, source: Tensor, begin: int, num_bytes: int
    ) -> None:
        """Copy."""
        self.copy(part_of(target, first, num_bytes), part_of(source, begin, num_bytes))

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:  # noqa: ARG002
        """Copy."""
        target.copy_(source)
        return _Done()

    def capture(self, work: Callable[[], None]) -> Graph:  # noqa: ARG002 - the protocol's
        """Refuse: a CPU has no launches to save."""
        raise RuntimeError("a CPU has no graphs")

    def total_bytes(self) -> int:
        """Return 0: the system's memory is counted elsewhere."""
        return 0

    def free_bytes(self) -> int | None:
        """Return None: the system's memory is counted elsewhere."""
        return None

    def held_bytes(self) -> int:
        """Return 0, as `total_bytes`."""
        return 0

    def release_unused(self) -> None:
        """Nothing is held."""

    def synchronize(self) -> None:
        """Nothing is queued."""
