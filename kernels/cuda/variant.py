"""What a kernel tells the builder and the launcher about itself.

A kernel file has one frozen dataclass of compile-time parameters, its *variant*. The builder turns
`variant.kernel()` into machine code, the launcher passes `variant.arguments`; neither knows what
the kernel computes. Argument types are words, so that no tool needs another's type objects:

    "float32*"  device pointer to float32 elements      "int64"    a scalar, passed by value
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from kernels.cuda.errors import UnsupportedVariantError

# How parameters are written in the source of kernels and device functions. Numba takes a kernel's
# types from `arguments`, a device function's from the call.
Pointer: TypeAlias = Any  # to global memory, or an array in shared memory
Local: TypeAlias = Any  # an array of the thread
Scalar: TypeAlias = Any
Scalars: TypeAlias = Any  # a tuple of them
DeviceFunction: TypeAlias = Any

ARGUMENT_BYTES: Final = 8  # of every argument as it is packed for a launch
_PACKED_POINTER: Final = "Q"
_PACKED_SCALARS: Final = {"int32": "i4x", "int64": "q", "float32": "f4x"}  # x: a byte of nothing

# How elements of a model's dtype travel: Numba has no bfloat16 pointer and its float16 operators
# leave calls to a support library in the PTX, so both go as their 16 bits (see instructions).
STORAGE_TYPES = {"float32": "float32", "float16": "uint16", "bfloat16": "uint16"}


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the machine code of a good build looks like; `kernels.cuda.check` holds it to that.

    `registers` is the most a thread may take on capability 9.0: a kernel that takes more has lost
    its shape. `instructions` must occur, by the disassembler's names; a wide access is named with
    its bits: "LDG.128". `resident_blocks`, if given, is told to the compiler too: so many blocks
    must find registers on one multiprocessor, and it may use what they leave.

    `begins_early`: the kernel may be launched before what is ahead of it has ended, since it waits
    for that before it reads or writes anything (`instructions.early_launch`), but for what a step
    is given: `reads_early` are the positions of those arguments.
    """

    registers: int
    instructions: tuple[str, ...] = ()
    uses_float64: bool = False
    resident_blocks: int | None = None
    begins_early: bool = False
    reads_early: tuple[int, ...] = ()


class Variant(Protocol):
    """One kernel with every compile-time parameter chosen."""

    @property
    def name(self) -> str:
        """Name of the machine code's entry point; says every parameter."""
        ...

    @property
    def threads(self) -> int:
        """Threads of a block; the kernel is compiled for exactly this many."""
        ...

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters, in order."""
        ...

    @property
    def expectation(self) -> Expectation:
        """What its machine code must look like."""
        ...

    def kernel(self) -> Callable[..., None]:
        """Make the plain function Numba compiles and the simulator runs."""
        ...


def require_one_of(field: str, allowed: Iterable[object], given: object) -> None:
    """Raise UnsupportedVariantError where a parameter is none of what a kernel is written for."""
    choices = tuple(allowed)
    if given not in choices:
        raise UnsupportedVariantError(field, f"one of {', '.join(map(str, choices))}", given)


def require_between(field: str, lowest: int, highest: int, given: int) -> None:
    """Raise UnsupportedVariantError where a number is outside of what a kernel is written for."""
    if not lowest <= given <= highest:
        raise UnsupportedVariantError(field, f"between {lowest} and {highest}", given)


def require_multiple(field: str, unit: int, given: int, highest: int | None = None) -> None:
    """Raise UnsupportedVariantError where a size is no multiple of `unit`, or too large if limited.

    With `highest` it must be above zero, too.
    """
    if highest is None:
        if given % unit:
            raise UnsupportedVariantError(field, f"a multiple of {unit}", given)
    elif not 0 < given <= highest or given % unit:
        raise UnsupportedVariantError(field, f"a multiple of {unit} up to {highest}", given)


def argument_packing(arguments: tuple[str, ...]) -> struct.Struct:
    """Return what packs a launch's arguments, `ARGUMENT_BYTES` each, lowest byte first."""
    kinds = (
        _PACKED_POINTER if argument.endswith("*") else _PACKED_SCALARS[argument]
        for argument in arguments
    )
    return struct.Struct("<" + "".join(kinds))
