"""The runtime of a CUDA device, by torch: pinned memory, two streams, events, graphs.

Kernels and torch's own operations go to the *current* stream of the thread; `computing` makes that
the compute stream. torch's graphs are captured on a stream of their own, which is current then, so
whoever launches must ask for the current stream at every launch and never keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from compute_plane.cuda.drivers import Event, Graph


class CudaEvent:
    """A point in a stream of a CUDA device."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 - torch's stream, which has no types
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        """Ask the driver."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait without the interpreter lock."""
        self._event.synchronize()


class CudaDriver:
    """One CUDA device. Graphs share one memory pool: they never run at the same time."""

    has_graphs = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        self._compute = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the compute stream."""
        with self.computing():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def computing(self) -> AbstractContextManager[object]:
        """Make the compute stream current."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._compute)
        return context

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy from or to pinned memory."""
        with self.computing():
            target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> Event:
        """Queue a copy to pinned memory on the copy stream."""
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            target.copy_(source, non_blocking=True)
        # The memory must not be given to compute's next tensor while it is being read.
        source.record_stream(self._copy)
        return CudaEvent(self._copy)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Warm up, so that libraries have their workspaces, and capture."""
        with self.computing():
            work()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return _CudaGraph(graph, self)

    def reserved_bytes(self) -> int:
        """Return what torch's allocator holds."""
        return int(torch.cuda.memory_reserved(self.device))

    def free_bytes(self) -> int | None:
        """Return what the driver says is free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)


class _CudaGraph:
    def __init__(self, graph: Any, driver: CudaDriver) -> None:  # noqa: ANN401 - torch's graph
        self._graph = graph
        self._driver = driver

    def replay(self) -> None:
        with self._driver.computing():
            self._graph.replay()

    def release(self) -> None:
        self._graph.reset()
