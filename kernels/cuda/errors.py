"""What can go wrong between a kernel's source and its launch.

The compute plane maps these to its own error family; here they only say what happened.
"""

from __future__ import annotations

from planes.extras import the_extra


class CudaKernelError(Exception):
    """Any failure this package reports on purpose."""


class UnsupportedVariantError(CudaKernelError):
    """A kernel was asked for a shape or type it is not written for."""

    def __init__(self, field: str, allowed: str, given: object) -> None:
        super().__init__(f"{field} must be {allowed}, got {given!r}")
        self.field = field


class MissingToolchainError(CudaKernelError):
    """A part of the compiler is not installed; the message says how to get it."""

    def __init__(self, part: str) -> None:
        super().__init__(
            f"the CUDA compiler needs {part}, which is not installed: {the_extra('cuda')}"
        )
        self.part = part


class CompileError(CudaKernelError):
    """The compiler or the linker refused a kernel."""


class CacheDirectoryError(CudaKernelError):
    """The machine-code cache lies in a directory that others could write to."""


class DriverError(CudaKernelError, RuntimeError):
    """The CUDA driver is absent or refused a call; `status` is its name for the reason.

    A RuntimeError, as what torch reports of the device: those who catch one mean both.
    """

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call} failed: {status}")
        self.call = call
        self.status = status
