"""Numba's target for kernels: what it compiles ends as LLVM IR, and is optimised once.

Numba's own target makes every function ready for Python to call: it optimises what the function and
all that it calls consist of, makes machine code of that, and of two wrappers around it. Kernels are
many functions that call each other, so the innermost ones would go through the compiler again with
everything that calls them, and only the outermost is ever used, as an object file
(`kernels.cpu.compiled.object_code`). Here functions are only linked into those that call them.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial
from typing import Any, Final, NoReturn

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.cpu import CPUContext
from numba.core.fastmathpass import rewrite_module
from numba.core.registry import CPUDispatcher, CPUTarget, cpu_target
from numba.core.runtime import rtsys
from numba.core.target_extension import (
    CPU,
    dispatcher_registry,
    jit_registry,
    target_override,
    target_registry,
)
from numba.core.utils import threadsafe_cached_property

from kernels.cpu import instruction_set

TARGET_NAME: Final = "kernels"
NUMBAS: Final = ("numba_", "NRT_", "Py", "_Py", ".numba.")
"""What symbols begin with that are found where Numba is, those of functions that call each other
in a circle among them."""

# The choice is made at the latest now: Numba asks what to compile for when it sees a function.
instruction_set.selected_instruction_set()
numba.config.CPU_NAME, numba.config.CPU_FEATURES = instruction_set.forced_target() or (None, None)


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """What a function and those it calls consist of, unoptimised."""

    def _optimize_functions(self, module: llvmlite.binding.ModuleRef) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Leave it to `_Codegen.object_file`."""

    def _finalize_specific(self) -> None:
        """Make no machine code."""


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library

    def _add_module(self, module: llvmlite.binding.ModuleRef) -> None:
        """Give no module to the engine, which would make machine code of it some time."""

    def object_file(self, module: llvmlite.binding.ModuleRef, symbol: str) -> bytes:
        """Optimise a module that has all its functions, and make machine code of one of them.

        Raises TypeError if it needs something that is not there without Numba.
        """
        passes, builder = self._module_pass_manager()
        passes.run(module, builder)
        # Known before, each function that one other calls would be inlined, whatever its size:
        # a fifth more to compile, and no faster.
        for part in (*module.functions, *module.global_variables):
            if not part.is_declaration and part.name != symbol:
                part.linkage = llvmlite.binding.Linkage.internal
        passes = llvmlite.binding.create_new_module_pass_manager()
        passes.add_global_dead_code_eliminate_pass()
        passes.add_strip_dead_prototype_pass()
        passes.run(module, builder)
        parts = (*module.functions, *module.global_variables)
        needed = [part.name for part in parts if part.is_declaration]
        if missing := [part for part in needed if part.startswith(NUMBAS)]:
            raise TypeError(f"{symbol} needs {', '.join(missing)}, which only Numba has")
        return bytes(self._tm.emit_object(module))


class _Context(CPUContext):  # type: ignore[misc]
    def init(self) -> None:
        super().init()  # makes a code generator of its own: some milliseconds
        self._internal_codegen = _Codegen(TARGET_NAME)

    def load_additional_registries(self) -> None:
        """Load them, and Numba's runtime as its own functions in this process need it."""
        rtsys.initialize(cpu_target.target_context)
        super().load_additional_registries()

    def post_lowering(self, module: ir.Module, _: _Library) -> None:
        """Kernels need nothing of Numba's runtime, which would be linked to every function."""
        if self.fastmath:
            rewrite_module(module, self.fastmath)

    def get_executable(self, library: _Library, *_: object) -> Callable[..., Any]:
        """Return what Numba knows the function by.

        Its dispatcher takes built-in functions only; one that is bound to a dict of its own equals
        no other.
        """
        library.finalize()
        return {}.get


class _Target(CPUTarget):  # type: ignore[misc]
    @threadsafe_cached_property
    def _toplevel_target_context(self) -> _Context:
        return _Context(self.typing_context, TARGET_NAME)


class KernelFunction(CPUDispatcher):  # type: ignore[misc]
    """A function that operations are compiled from.

    Python cannot call it, nor can what `numba.njit` compiles, which it cannot call either.
    """

    targetdescr = _Target(TARGET_NAME)

    def __call__(self, *_: object) -> NoReturn:
        """Raise TypeError."""
        raise TypeError(f"{self.__name__} is for compiled code to call")

    def object_file(self, num_arguments: int, symbol: str) -> bytes:
        """Compile it for so many int64: return an object file that loads without Numba.

        It defines `symbol`. Raises TypeError if it needs something that is not there without Numba.
        """
        arguments = [types.int64] * num_arguments
        with target_override(TARGET_NAME):  # where Numba asks with no function at hand
            self.compile(types.void(*arguments))
        compiled = self.overloads[tuple(arguments)]
        module = llvmlite.binding.parse_assembly(compiled.library.get_llvm_str())
        entry = _entry(symbol, compiled.fndesc.llvm_func_name, num_arguments)
        module.link_in(llvmlite.binding.parse_assembly(entry))
        codegen: _Codegen = compiled.library.codegen
        return codegen.object_file(module, symbol)


def _entry(symbol: str, function: str, num_arguments: int) -> str:
    """Return LLVM IR of what is called: the function, without Numba's result and error.

    Beside it stands what Numba calls frexp(3).
    """
    kinds = ["i64"] * num_arguments
    arguments = [f"i64 %a{i}" for i in range(num_arguments)]
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


def kernel_function(function: Callable[..., object], fastmath: Set[str]) -> Any:  # noqa: ANN401
    """Make a function a `KernelFunction`.

    `fastmath`: LLVM's flags of its float operations, whoever calls it; none: each is rounded by
    itself. (Left unsaid, they would be those of the first function that calls it.)
    """
    options = {
        "nopython": True,
        "error_model": "numpy",
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
        "fastmath": set(fastmath),  # Numba takes no frozenset
    }
    return KernelFunction(function, targetoptions=options)


class _Kernels(CPU):  # type: ignore[misc]
    """Its name among Numba's targets: what is there for any CPU is there for kernels."""


target_registry[TARGET_NAME] = _Kernels
dispatcher_registry[_Kernels] = KernelFunction
# For what Numba itself has in Python, as `max` of two numbers.
jit_registry[_Kernels] = lambda **_: partial(kernel_function, fastmath=frozenset())
