"""Machine code → driver module → launch on a stream.

A context must be current in the calling thread (torch makes one) and must stay: a kernel lives as
long as its context. The stream is an argument of every launch, because the caller reads
`torch.cuda.current_stream()` each time: a stream kept from before would escape graph capture.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from kernels.cuda.errors import DriverError
from kernels.cuda.variant import Variant, launch_types

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


class LoadedKernel:
    """One variant's machine code in the current context, ready to launch.

    `image` is a cubin for the device, or PTX, which the driver compiles itself. `driver` is
    `cuda.bindings.driver` unless a test gives its own. Raises DriverError.
    """

    def __init__(self, variant: Variant, image: bytes, *, driver: Driver = None) -> None:
        self._driver: Driver = _bindings() if driver is None else driver
        self._types = launch_types(variant.arguments)
        self._threads = variant.threads
        self.name = variant.name
        # PTX is text and must end in a zero byte; behind a cubin one more byte does no harm.
        self._module = self._call("cuModuleLoadData", image + b"\0")
        self._function = self._call("cuModuleGetFunction", self._module, variant.name.encode())

    def launch(self, grid: tuple[int, int, int], stream: int, *arguments: float) -> None:
        """Queue one launch on `stream` (a handle; 0 is the default stream).

        `arguments` follow `variant.arguments`; device pointers are plain addresses
        (`tensor.data_ptr()`), and the tensors must outlive the launch. Raises DriverError, also for
        a fault that an earlier launch left behind.
        """
        if len(arguments) != len(self._types):
            message = f"{self.name} takes {len(self._types)} arguments, got {len(arguments)}"
            raise TypeError(message)
        if 0 in grid:
            return  # the driver refuses an empty grid, and there is nothing to do
        packed = (arguments, self._types)
        self._call(
            "cuLaunchKernel", self._function, *grid, self._threads, 1, 1, 0, stream, packed, 0
        )

    def attributes(self) -> dict[str, int]:
        """Return registers, shared and local bytes and the largest block, by the driver."""
        names = self._driver.CUfunction_attribute
        return {
            word: int(self._call("cuFuncGetAttribute", getattr(names, name), self._function))
            for word, name in _ATTRIBUTES.items()
        }

    def _call(self, name: str, *arguments: object) -> _Result:
        try:
            status, *results = getattr(self._driver, name)(*arguments)
        except RuntimeError as error:  # the bindings' way to say that there is no driver library
            raise DriverError(name, f"no CUDA driver: {error}") from error
        if int(status) != 0:
            raise DriverError(name, getattr(status, "name", str(status)))
        return results[0] if results else None


def _bindings() -> Driver:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("import cuda.bindings", str(error)) from error
    return driver
