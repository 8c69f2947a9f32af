"""A CUDA device of which only the host's side is there: what a step costs the host shows, alone.

`CudaExecutor` runs on it with the kernels' own operations. Tensors lie in host memory; copies are
made; launches and graphs do nothing but hand their arguments over; a step is done so many
microseconds after it began, as `PlayedDriver.step_us` says, whatever is in it. What the CUDA
runtime takes of the host (some microseconds for each of its calls) is missing; the calls are
counted.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from compute_plane.cuda.build import build_on, planned_weights
from compute_plane.cuda.drivers import CpuDriver, Event, Graph
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.operands import LogprobColumns, LogprobOutputs, SamplingColumns
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from kernels.cuda.launch import SUCCESS, BoundLaunch, LoadedKernel
from kernels.cuda.variant import Variant

MULTIPROCESSORS = 132
PLENTY_BYTES = 1 << 36
PR_SET_TIMERSLACK = 29

_of_thread = threading.local()


@dataclass(slots=True)
class Calls:
    """Of the runtime, by kind."""

    copies: int = 0
    launches: int = 0
    replays: int = 0
    events: int = 0

    def take(self) -> Calls:
        """Return them, and count from 0."""
        taken = Calls(self.copies, self.launches, self.replays, self.events)
        self.copies = self.launches = self.replays = self.events = 0
        return taken


class PlayedEvent:
    """A moment on the device's clock. `late_s`: how long a device takes to wake who waits."""

    def __init__(self, at: float, late_s: float) -> None:
        self._at = at
        self._late_s = late_s

    def is_done(self) -> bool:
        return time.perf_counter() >= self._at

    def wait(self) -> None:
        """Sleep until then, to some microseconds, and for as long as the device is late."""
        _sleep_exactly()
        left = self._at - time.perf_counter()
        if left > 0:
            time.sleep(left + self._late_s)


def _sleep_exactly() -> None:
    """Have this thread's sleeps end when they should, where the system can do that."""
    if not hasattr(_of_thread, "is_exact"):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _of_thread.is_exact = True


class _Graph:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def replay(self) -> None:
        self._calls.replays += 1

    def release(self) -> None:
        """Nothing is held."""


class PlayedDriver(CpuDriver):
    """Streams, events and graphs of the device. `step_us`: of every step, 0 is at once.

    `wake_us`: how late the device wakes who does not watch it. Without graphs every step is
    launched kernel by kernel.
    """

    def __init__(self, step_us: float, wake_us: float = 0.0, *, has_graphs: bool = True) -> None:
        super().__init__()
        self.has_graphs = has_graphs
        self.step_us = step_us
        self.wake_us = wake_us
        self.calls = Calls()
        self._free_at = 0.0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.calls.copies += 1
        super().copy(target, source)

    def download(self, target: Tensor, source: Tensor, *, is_watched: bool = False) -> Event:
        """Copy; the step is over when the device is through with it."""
        self.calls.copies += 1
        self.calls.events += 1
        super().download(target, source, is_watched=is_watched)
        self._free_at = max(self._free_at, time.perf_counter()) + self.step_us / 1e6
        return PlayedEvent(self._free_at, 0.0 if is_watched else self.wake_us / 1e6)

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        return _Graph(self.calls)

    def total_bytes(self) -> int:
        return PLENTY_BYTES

    def free_bytes(self) -> int | None:
        return PLENTY_BYTES


class _CountingLibrary:
    """Stands for `cuda.bindings.driver`: launches nothing, and counts."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def cuModuleLoadData(self, image: bytes) -> tuple[int, bytes]:  # noqa: N802 - the driver's names
        return SUCCESS, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[int, bytes]:  # noqa: ARG002, N802
        return SUCCESS, name

    def cuLaunchKernel(self, *_: object) -> tuple[int]:  # noqa: N802
        self._calls.launches += 1
        return (SUCCESS,)


class CountingLauncher:
    """A `Launcher` that does what one does before the driver is called."""

    device = torch.device("cpu")
    num_multiprocessors = MULTIPROCESSORS
    fetches_ahead = True

    def __init__(self, calls: Calls) -> None:
        self._library = _CountingLibrary(calls)
        self._loaded: dict[Variant, LoadedKernel] = {}
        self._recorded: list[BoundLaunch] | None = None

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Compile nothing."""
        for variant in variants:
            self._loaded[variant] = LoadedKernel(variant, b"", driver=self._library)

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        """Hand the arguments over to nobody."""
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in arguments]
        self._loaded[variant].launch(grid, 0, *values)
        if self._recorded is not None:
            self._recorded.append(self._loaded[variant].bind(grid, *values))

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """As a CUDA device's launcher does."""
        recorded: list[BoundLaunch] = []
        self._recorded = recorded
        try:
            work()
        finally:
            self._recorded = None

        def again() -> None:
            for bound in recorded:
                bound.launch(0)

        return again


class PlayedOperations(KernelOperations):
    """The kernels' operations, of which what is answered has a result: the first token, likely."""

    def sample(
        self, out: Tensor, is_finite: Tensor, logits: Tensor, columns: SamplingColumns
    ) -> None:
        super().sample(out, is_finite, logits, columns)
        out.zero_()
        is_finite.fill_(1)

    def logprobs(self, out: LogprobOutputs, logits: Tensor, columns: LogprobColumns) -> None:
        super().logprobs(out, logits, columns)
        for tensor in (out.token_logprobs, out.top_tokens, out.top_logprobs):
            tensor.zero_()

    def repeated(self, work: Callable[[], None]) -> Callable[[], None]:
        sampled: list[tuple[Tensor, Tensor]] = []

        def sample(out: Tensor, is_finite: Tensor, logits: Tensor, how: SamplingColumns) -> None:
            sampled.append((out, is_finite))
            PlayedOperations.sample(self, out, is_finite, logits, how)

        with patch.object(self, "sample", sample):
            again = super().repeated(work)

        def again_with_answers() -> None:
            again()
            for out, is_finite in sampled:
                out.zero_()
                is_finite.fill_(1)

        return again_with_answers


def build_played(
    context: ExecutorContext, step_us: float, wake_us: float = 0.0, *, has_graphs: bool = True
) -> tuple[BuiltExecutor, PlayedDriver]:
    """Build the CUDA executor on such a device, as `build_cuda` does on a real one."""
    if context.model is None:
        raise ValueError("the CUDA executor needs a model")
    torch.set_num_threads(1)  # what is the device's on a real one is done here, on one core
    driver = PlayedDriver(step_us, wake_us, has_graphs=has_graphs)
    plan = planned_weights(context, context.model, torch.device("cuda"))
    operations = PlayedOperations(
        CountingLauncher(driver.calls), context.spec, plan.dtype, context.block_size,
        plan.quantized, has_dense=plan.has_dense,
    )  # fmt: skip
    return build_on(context, context.model, plan, driver, operations), driver
