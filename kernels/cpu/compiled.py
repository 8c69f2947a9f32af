"""What kernels are written with: functions that become machine code, and access to memory.

Importing this imports the compiler, so only modules that hold kernels do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from llvmlite import ir
from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.kernel_target import KernelFunction, kernel_function
from kernels.cpu.machine_code import symbol_of
from kernels.cpu.operation import Operation, StepWord, operation_named
from kernels.cpu.vector_ir import F32, I8, I16, I32, I64, Builder, Value, i64, load
from kernels.uncollected import uncollected

Function = TypeVar("Function", bound=Callable[..., object])

EXACT_ORDER: Final = frozenset({"contract"})
"""Fused multiply-add allowed; every sum runs in the order that is written."""
KERNELS: Final = "kernels.cpu."


@dataclass(frozen=True, slots=True)
class _Definition:
    """What an operation is compiled from."""

    function: Callable[..., None]
    num_arguments: int


_definitions: Final[dict[str, _Definition]] = {}


def operation(*, num_arguments: int = 5) -> Callable[[Callable[..., None]], Operation]:
    """Make a module-level function of integers an `Operation`.

    It can call what is inlined or emitted, and memory, nothing of Python's.
    """

    def defined(function: Callable[..., None]) -> Operation:
        module = function.__module__
        name = f"{module.removeprefix(KERNELS)}.{function.__name__}"
        if not module.startswith(KERNELS):
            name = f"{module}:{function.__name__}"
        _definitions[name] = _Definition(function, num_arguments)
        return operation_named(name)

    return defined


def define(made: Operation, function: Callable[..., None]) -> None:
    """Say what an operation of the catalogue is compiled from: a function that a factory returned.

    Its name begins with the module that calls this.
    """
    _definitions[made.name] = _Definition(function, 5)


def object_code(name: str) -> bytes:
    """Compile the operation of a name: return an object file that loads without Numba.

    Raises TypeError if it needs something that is not there without Numba.
    """
    if name not in _definitions:
        importlib.import_module(KERNELS + name.partition(".")[0])
    definition = _definitions[name]
    function: KernelFunction = kernel_function(definition.function, EXACT_ORDER)
    with uncollected():
        return function.object_file(definition.num_arguments, symbol_of(name))


def inlined() -> Callable[[Function], Function]:
    """Compile a function that operations call; it becomes part of their machine code."""
    decorate: Callable[[Function], Function] = partial(kernel_function, fastmath=EXACT_ORDER)
    return decorate


@emitted(types.int64, types.int64, types.int64)
def word(builder: Builder, address: Value, index: Value) -> Value:
    """Return int64 word `index` of the words at `address`."""
    return load(builder, builder.add(address, builder.shl(index, i64(3))), I64, align=8)


def _elements_at(element: types.Type, stored_as: ir.Type) -> Any:  # noqa: ANN401 - Numba's objects
    """Return what makes an address a pointer: `carray(float32_at(address), (rows, columns))`."""

    def pointer(builder: Builder, address: Value) -> Value:
        return builder.inttoptr(address, stored_as.as_pointer())

    return emitted(types.CPointer(element), types.int64)(pointer)


float32_at = _elements_at(types.float32, F32)
int64_at = _elements_at(types.int64, I64)
int32_at = _elements_at(types.int32, I32)
uint16_at = _elements_at(types.uint16, I16)
int8_at = _elements_at(types.int8, I8)
uint8_at = _elements_at(types.uint8, I8)


@inlined()
def scratch(header: int, worker: int) -> int:
    """Return the address of the calling worker's scratch memory."""
    first: int = word(header, StepWord.SCRATCH)
    size: int = word(header, StepWord.SCRATCH_BYTES)
    return first + worker * size
