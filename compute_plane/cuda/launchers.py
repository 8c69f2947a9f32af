"""Launching kernels with tensors: the border between the operations and the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import structlog
import torch
from torch import Tensor

from compute_plane.errors import DeviceUnavailableError
from kernels.cuda import build
from kernels.cuda.build_ahead import build_ahead
from kernels.cuda.errors import CudaKernelError
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES
from kernels.cuda.launch import BoundLaunch, LoadedKernel

if TYPE_CHECKING:
    from kernels.cuda.variant import Variant

log = structlog.get_logger()

BEGINS_EARLY: Final[tuple[str, ...]] = ("",)
"""Beginnings of the names of kernels that are launched before what is ahead of them has ended, if
they can; "" is that of all (ADR 0031)."""
WAITS: Final[tuple[str, ...]] = ("dense_matmul_added_*_n32",)
"""Patterns of the names of kernels that are not, nevertheless: added products of some 4096 outputs.

They have fewer blocks than there are multiprocessors, which begin two by two where blocks of the
launch ahead end first: at 8 B and eight rows that lost 3 %."""


def begins_before_end(variant: Variant) -> bool:
    """Whether a kernel is launched before what is ahead of it has ended."""
    name = variant.name
    return (
        variant.expectation.begins_early
        and name.startswith(BEGINS_EARLY)
        and not any(fnmatchcase(name, pattern) for pattern in WAITS)
    )


Recorded: TypeAlias = list[tuple[BoundLaunch, Sequence[Tensor | float]]]
"""Launches, and what they were given, which must outlive them."""


class Launcher(Protocol):
    """Queues kernels on the current stream of one device."""

    @property
    def device(self) -> torch.device:
        """The device."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """What a grid is planned for."""
        ...

    @property
    def fetches_ahead(self) -> bool:
        """Whether kernels can fetch what they do not read (`instructions.early_launch`)."""
        ...

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Build and load variants, so that the first launch need not."""
        ...

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        """Queue a launch; tensors, contiguous, go as the addresses of their memory."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work`, which queues launches and nothing else; return what queues them again.

        That takes the host less: the very same launches, on the same tensors, which are kept.
        """
        ...


class CudaLauncher:
    """The kernels of one CUDA device, compiled once into `cache_dir`.

    Raises DeviceUnavailableError where a kernel cannot be built or loaded.
    """

    def __init__(self, device: torch.device, cache_dir: Path) -> None:
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.num_multiprocessors = int(properties.multi_processor_count)
        self._capability = (int(properties.major), int(properties.minor))
        self.fetches_ahead = self._capability >= EARLY_LAUNCHES  # as launches can begin early
        self._cache_dir = cache_dir
        self._loaded: dict[Variant, LoadedKernel] = {}
        self._recorded: Recorded | None = None
        torch.empty(1, device=device)  # makes the context current in this thread

    def prepare(self, variants: Sequence[Variant]) -> None:
        """Build and load variants; what is compiled is logged, for it takes seconds each."""
        try:
            build_ahead(variants, self._capability, self._cache_dir, progress=_log_progress)
        except CudaKernelError as error:
            raise DeviceUnavailableError(f"device: cuda: {error}", field="device") from error
        for variant in variants:
            self._load(variant)

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        """Queue a launch on the stream that is current now: in a capture it is another one."""
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in arguments]
        kernel = self._loaded.get(variant) or self._load(variant)
        kernel.launch(grid, current_stream(self.device), *values)
        if self._recorded is not None:
            self._recorded.append((kernel.bind(grid, *values), arguments))

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """As `Launcher.record`. Again goes to the stream that is current then."""
        recorded: Recorded = []
        self._recorded = recorded
        try:
            work()
        finally:
            self._recorded = None

        def again() -> None:
            stream = current_stream(self.device)
            for bound, _ in recorded:
                bound.launch(stream)

        return again

    def _load(self, variant: Variant) -> LoadedKernel:
        if variant not in self._loaded:
            try:
                image = build.build(
                    variant,
                    self._capability,
                    self._cache_dir,
                    progress=_log_progress,
                )
                begins_early = self.fetches_ahead and begins_before_end(variant)
                self._loaded[variant] = LoadedKernel(variant, image, begins_early=begins_early)
            except CudaKernelError as error:
                raise DeviceUnavailableError(
                    f"device: cuda: {variant.name}: {error}", field="device"
                ) from error
        return self._loaded[variant]


def current_stream(device: torch.device) -> int:
    """Return the handle of the stream that is current on a device.

    Asked for at every launch: a tenth of what making `torch.cuda.current_stream()` an object takes.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def _log_progress(line: str) -> None:
    log.warning("kernel", progress=line)
