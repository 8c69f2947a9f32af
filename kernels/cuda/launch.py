"""Machine code → driver module → launch on a stream.

A context must be current in the calling thread (torch makes one) and must stay: a kernel lives as
long as its context. The stream is an argument of every launch, because the caller reads
`torch.cuda.current_stream()` each time: a stream kept from before would escape graph capture.

Steps that no graph holds launch hundreds of kernels, so a launch is short: its arguments are packed
by one call into memory that the kernel keeps, beside the addresses that the driver wants of them. A
launch that comes again as it was keeps memory of its own, and nothing is packed (`BoundLaunch`).

    values      │ argument 0 │ argument 1 │ …    8 bytes each, of which the driver copies as many
    addresses   │     ↑      │     ↑      │ …    as the parameter has, before its call returns
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from kernels.cuda.errors import DriverError
from kernels.cuda.variant import ARGUMENT_BYTES, Variant, argument_packing

# `cuda.bindings.driver`, which is untyped, and what it returns.
Driver: TypeAlias = Any
_Result: TypeAlias = Any

# What the driver reports of a loaded kernel: our word → the attribute's.
_ATTRIBUTES = {
    "registers": "CU_FUNC_ATTRIBUTE_NUM_REGS",
    "shared_bytes": "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES",
    "local_bytes": "CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES",
    "max_threads": "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
}

SUCCESS: Final = 0  # of the driver's calls


class LoadedKernel:
    """One variant's machine code in the current context, ready to launch.

    `image` is a cubin for the device, or PTX, which the driver compiles itself. `begins_early`:
    what is ahead on the stream need not have ended; for kernels that wait for it themselves, on
    devices from `fitted_ptx.EARLY_LAUNCHES` on. `driver` is `cuda.bindings.driver` unless a
    test gives its own. One thread at a time may launch it. Raises DriverError.
    """

    def __init__(
        self, variant: Variant, image: bytes, *, begins_early: bool = False, driver: Driver = None
    ) -> None:
        self._driver: Driver = _bindings() if driver is None else driver
        self._packing = argument_packing(variant.arguments)
        self._num_arguments = len(variant.arguments)
        self._parameters = _Parameters(self._num_arguments)
        self._threads = variant.threads
        self.name = variant.name
        # PTX is text and must end in a zero byte; behind a cubin one more byte does no harm.
        self._module = self._call("cuModuleLoadData", image + b"\0")
        self._function = self._call("cuModuleGetFunction", self._module, variant.name.encode())
        self._begins_early = begins_early
        self._early = _early_launch(self._driver, variant.threads) if begins_early else None

    def launch(self, grid: tuple[int, int, int], stream: int, *arguments: float) -> None:
        """Queue one launch on `stream` (a handle; 0 is the default stream).

        `arguments` follow `variant.arguments`; device pointers are plain addresses
        (`tensor.data_ptr()`), and the tensors must outlive the launch. Raises DriverError, also for
        a fault that an earlier launch left behind; TypeError and struct.error for arguments that do
        not fit.
        """
        self._pack(self._parameters, arguments)
        self._queue(self._parameters, self._early, grid, stream)

    def bind(self, grid: tuple[int, int, int], *arguments: float) -> BoundLaunch:
        """Return a launch that can be queued again and again. Raises as `launch` for arguments."""
        parameters = _Parameters(self._num_arguments)
        self._pack(parameters, arguments)
        early = _early_launch(self._driver, self._threads) if self._begins_early else None
        return BoundLaunch(partial(self._queue, parameters, early, grid))

    def attributes(self) -> dict[str, int]:
        """Return registers, shared and local bytes and the largest block, by the driver."""
        names = self._driver.CUfunction_attribute
        return {
            word: int(self._call("cuFuncGetAttribute", getattr(names, name), self._function))
            for word, name in _ATTRIBUTES.items()
        }

    def _pack(self, parameters: _Parameters, arguments: Sequence[float]) -> None:
        if len(arguments) != self._num_arguments:
            message = f"{self.name} takes {self._num_arguments} arguments, got {len(arguments)}"
            raise TypeError(message)
        self._packing.pack_into(parameters.values, 0, *arguments)

    def _queue(
        self, parameters: _Parameters, early: _Result, grid: tuple[int, int, int], stream: int
    ) -> None:
        """Queue a launch of arguments that are packed. `early`: its description; None: in turn."""
        if 0 in grid:
            return  # the driver refuses an empty grid, and there is nothing to do
        if early is not None:
            early.gridDimX, early.gridDimY, early.gridDimZ = grid
            early.hStream = stream
            self._call("cuLaunchKernelEx", early, self._function, parameters.address, 0)
            return
        (status,) = self._driver.cuLaunchKernel(
            self._function, *grid, self._threads, 1, 1, 0, stream, parameters.address, 0
        )
        if status != SUCCESS:
            raise _refusal("cuLaunchKernel", status)

    def _call(self, name: str, *arguments: object) -> _Result:
        try:
            status, *results = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # the bindings' way to say that there is no driver library
            raise DriverError(name, f"no CUDA driver: {error}") from error
        if status != SUCCESS:
            raise _refusal(name, status)
        return results[0] if results else None


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """A launch with its arguments. What they point to must outlive it."""

    _queue: Callable[[int], None]

    def launch(self, stream: int) -> None:
        """Queue it on `stream`. Raises DriverError, as `LoadedKernel.launch`."""
        self._queue(stream)


class _Parameters:
    """Memory for the arguments of a launch, and the `address` of where the driver finds them."""

    def __init__(self, count: int) -> None:
        self.values = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.values)
        places = range(first, first + count * ARGUMENT_BYTES, ARGUMENT_BYTES)
        self._addresses = (ctypes.c_void_p * count)(*places)
        self.address = ctypes.addressof(self._addresses)


def _early_launch(driver: Driver, threads: int) -> _Result:
    """Return a launch's description but for grid and stream, as CUDA's manual has it."""
    attribute = driver.CUlaunchAttribute()
    ids = driver.CUlaunchAttributeID
    attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    launch = driver.CUlaunchConfig()
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = threads, 1, 1
    launch.attrs, launch.numAttrs = [attribute], 1
    return launch


def _refusal(name: str, status: _Result) -> DriverError:
    return DriverError(name, getattr(status, "name", str(status)))


def _bindings() -> Driver:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("import cuda.bindings", str(error)) from error
    return driver
