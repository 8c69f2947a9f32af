"""The runtime of a CUDA device, by torch: pinned memory, two streams, events, graphs.

Kernels and torch's own operations go to the *current* stream of the thread; `computing` makes that
the compute stream. torch's graphs are captured on a stream of their own, which is current then, so
whoever launches must ask for the current stream at every launch and never keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from compute_plane.cuda.drivers import Event, Graph
from kernels.cuda.errors import DriverError
from kernels.cuda.launch import SUCCESS
from planes.errors import MemoryError as OutOfMemoryError

EXACT_BYTES: Final = 64 << 20
"""From here on pinned memory is as large as asked for: torch rounds up to powers of two."""


class PinnedMemory:
    """Host memory that was pinned once it was there, of exactly the size asked for.

    It is kept until the process ends: given back, it would be somebody else's that a device writes.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8 memory [num_bytes]. Raises the family's MemoryError if it cannot be had."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)
        if status != runtime.cudaError.success:
            raise OutOfMemoryError(
                f"{num_bytes} bytes of host memory cannot be pinned for the device "
                f"({runtime.cudaGetErrorString(status)}); a smaller --swap-space takes less"
            )
        self._buffers.append(buffer)
        return buffer


class CudaEvent:
    """A point in a stream of a CUDA device.

    Who waits for it sleeps until the device calls (`blocking`), which is late, or if `is_watched`
    has the runtime look again and again, which takes a core (`step_times`). `source`: memory that
    is read until then. `unused`: the runtime's events of this kind that nobody has any more.
    """

    def __init__(
        self,
        stream: Any,  # noqa: ANN401 - torch's
        *,
        is_watched: bool = False,
        source: Tensor | None = None,
        unused: list[Any] | None = None,
    ) -> None:
        self._device = stream.device
        self._source = source
        self._unused = unused
        self._event = unused.pop() if unused else torch.cuda.Event(blocking=not is_watched)
        self._event.record(stream)

    def __del__(self) -> None:
        """Leave the runtime's event to another one: to make one takes longer than to record it."""
        if self._unused is not None:
            self._unused.append(self._event)

    def is_done(self) -> bool:
        """Ask the driver."""
        torch.cuda.set_device(self._device)  # as in `CudaDriver.computing`
        return bool(self._event.query())

    def wait(self) -> None:
        """Wait without the interpreter lock."""
        torch.cuda.set_device(self._device)  # as in `CudaDriver.computing`
        self._event.synchronize()


class _Computing:
    """Makes a stream and its device current; inside itself it does nothing, which saves much."""

    def __init__(self, device: torch.device, stream: Any) -> None:  # noqa: ANN401 - as above
        self._device = device
        self._stream = stream
        self._depth = 0
        self._context: Any = None

    def __enter__(self) -> None:
        if self._depth == 0:
            torch.cuda.set_device(self._device)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
        self._depth += 1

    def __exit__(self, *raised: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._context.__exit__(*raised)


class CudaDriver:
    """One CUDA device. Graphs share one memory pool: they never run at the same time.

    `limit_bytes`: that torch may take of its memory; None: all. What the CUDA context and loaded
    kernels take is not counted.
    """

    has_graphs = True

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self.device = device
        self._limit_bytes = limit_bytes
        torch.cuda.set_device(device)
        if limit_bytes is not None:
            _, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        self._compute = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._computed = torch.cuda.Event()
        self._unused_events: dict[bool, list[Any]] = {False: [], True: []}
        self._computing = _Computing(device, self._compute)
        self._pool: Any = None
        self.num_graphs = 0
        """Graphs that were captured and not released."""
        self._pinned = PinnedMemory()
        compute_products_as_told()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Return pinned memory."""
        if num_bytes >= EXACT_BYTES:
            return self._pinned.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the compute stream."""
        with self.computing():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def computing(self) -> AbstractContextManager[object]:
        """Make the compute stream current, and the device, which every thread begins without.

        A thread that came back to device 0 would leave a context there, in memory that is not ours.
        """
        return self._computing

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy from or to pinned memory."""
        with self.computing():
            target.copy_(source, non_blocking=True)

    def copy_part(
        self, target: Tensor, first: int, source: Tensor, begin: int, num_bytes: int
    ) -> None:
        """Queue a copy from or to pinned memory, or within the device."""
        copy_bytes(target, first, source, begin, num_bytes, self._compute)

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        """Queue a copy to pinned memory on the copy stream."""
        self._computed.record(self._compute)
        self._copy.wait_event(self._computed)
        copy_bytes(target, 0, source, 0, target.nbytes, self._copy)
        # The memory must not be given to compute's next tensor while it is being read.
        unused = self._unused_events[is_watched]
        return CudaEvent(self._copy, is_watched=is_watched, source=source, unused=unused)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Warm up, so that libraries have their workspaces, and capture."""
        with self.computing():
            work()
        if self.num_graphs == 0:
            # torch gives a pool up with the last graph in it, and refuses to use it again as long
            # as something of it is held; its products' workspace is, which the first capture made.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A capture that fails leaves its own stream current; the context around it puts that right.
        with (
            self.computing(),
            torch.cuda.stream(self._compute),
            torch.cuda.graph(graph, pool=self._pool),
        ):
            work()
        self.num_graphs += 1
        return _CudaGraph(graph, self)

    def total_bytes(self) -> int:
        """Return what the device has, or the limit."""
        _, total = torch.cuda.mem_get_info(self.device)
        return int(total) if self._limit_bytes is None else min(int(total), self._limit_bytes)

    def free_bytes(self) -> int | None:
        """Return what the driver says is free, or what the limit leaves of it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        if self._limit_bytes is not None:
            reserved = torch.cuda.memory_reserved(self.device)
            free = min(free, max(0, self._limit_bytes - reserved))
        return int(free)

    def held_bytes(self) -> int:
        """Return what torch has reserved, the memory of graphs in it."""
        return int(torch.cuda.memory_reserved(self.device))

    def release_unused(self) -> None:
        """Empty torch's caches, once nobody uses what lies in them any more."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.device)


def copy_bytes(
    target: Tensor,
    first: int,
    source: Tensor,
    begin: int,
    num_bytes: int,
    stream: Any,  # noqa: ANN401 - torch's
) -> None:
    """Queue a copy by the driver itself, which takes the host a fraction of what torch's does.

    Of contiguous tensors, from and to bytes of theirs; host memory is pinned.
    """
    (status,) = _bindings().cuMemcpyAsync(
        target.data_ptr() + first, source.data_ptr() + begin, num_bytes, stream.cuda_stream
    )
    if status != SUCCESS:
        raise DriverError("cuMemcpyAsync", getattr(status, "name", str(status)))


@cache
def _bindings() -> Any:  # noqa: ANN401 - untyped
    from cuda.bindings import driver

    return driver


def compute_products_as_told() -> None:
    """Have torch's products lose nothing that their dtype has, whatever the environment says."""
    # Images that bring torch let it round float32 to 10 bits (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
    torch.set_float32_matmul_precision("highest")
    # Sums of long products are added in float32 to their end, not in the rows' dtype.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


class _CudaGraph:
    def __init__(self, graph: Any, driver: CudaDriver) -> None:  # noqa: ANN401 - torch's graph
        self._graph = graph
        self._driver = driver

    def replay(self) -> None:
        with self._driver.computing():
            self._graph.replay()

    def release(self) -> None:
        self._graph.reset()
        self._driver.num_graphs -= 1
