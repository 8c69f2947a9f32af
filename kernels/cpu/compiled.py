"""What kernels are written with: functions that become machine code, and access to memory.

Importing this imports the compiler, so only modules that hold kernels do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types

from kernels.cpu import instruction_set
from kernels.cpu.emitted import emitted
from kernels.cpu.machine_code import symbol_of
from kernels.cpu.operation import Operation, StepWord, operation_named
from kernels.cpu.vector_ir import F32, I8, I16, I32, I64, Builder, Value, i64, load
from kernels.uncollected import uncollected

Function = TypeVar("Function", bound=Callable[..., object])

EXACT_ORDER: Final = {"contract"}
"""Fused multiply-add allowed; every sum runs in the order that is written."""
KERNELS: Final = "kernels.cpu."

# The choice is made at the latest now: Numba asks what to compile for when it sees a function.
instruction_set.selected_instruction_set()
numba.config.CPU_NAME, numba.config.CPU_FEATURES = instruction_set.forced_target() or (None, None)


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
    arguments = [types.int64] * definition.num_arguments
    compile_function = numba.cfunc(
        types.void(*arguments), nopython=True, error_model="numpy", fastmath=EXACT_ORDER
    )
    with uncollected():
        compiled = compile_function(definition.function)
    # Around the function Numba has put what turns errors into Python's; kernels have none.
    module = llvmlite.binding.parse_assembly(compiled.inspect_llvm())
    function = compiled.native_name.removeprefix("cfunc.")
    module.link_in(llvmlite.binding.parse_assembly(_entry(symbol_of(name), function, definition)))
    for part in (*module.functions, *module.global_variables):
        if not part.is_declaration and part.name != symbol_of(name):
            part.linkage = llvmlite.binding.Linkage.internal
    machine = compiled._library.codegen._tm
    passes = llvmlite.binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    options = llvmlite.binding.create_pipeline_tuning_options()
    passes.run(module, llvmlite.binding.create_pass_builder(machine, options))
    needed = [part.name for part in module.functions if part.is_declaration]
    if missing := [part for part in needed if part.startswith(("numba_", "NRT_", "Py", "_Py"))]:
        raise TypeError(f"{name} needs {', '.join(missing)}, which only Numba has")
    return bytes(machine.emit_object(module))


def _entry(symbol: str, function: str, definition: _Definition) -> str:
    """Return LLVM IR of what is called: the function, without Numba's result and error.

    Beside it stands what Numba calls frexp(3).
    """
    kinds = ["i64"] * definition.num_arguments
    arguments = [f"i64 %a{i}" for i in range(definition.num_arguments)]
    return f"""
        declare i32 @"{function}"({", ".join(["ptr", "ptr", *kinds])})
        define void @"{symbol}"({", ".join(arguments)}) {{
            %result = alloca ptr
            %error = alloca ptr
            %status = call i32 @"{function}"({", ".join(["ptr %result", "ptr %error", *arguments])})
            ret void
        }}
        declare double @frexp(double, ptr)
        define double @numba_frexp(double %x, ptr %exponent) {{
            %fraction = call double @frexp(double %x, ptr %exponent)
            ret double %fraction
        }}
    """


def inlined() -> Callable[[Function], Function]:
    """Compile a function that operations call; it becomes part of their machine code."""
    decorate: Callable[[Function], Function] = numba.njit(
        nogil=True, error_model="numpy", fastmath=EXACT_ORDER
    )
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
