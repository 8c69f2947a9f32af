"""Runs a case's launches in the simulator, and kernels whose source is broken on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from bench.gpu.case import Array, Case
from kernels.cuda.variant import Variant
from tests.simt import launch

Kernel = Callable[..., None]

# Statements whose deletion must be noticed.
SYNCHRONISATION = (
    "cuda.syncthreads()",
    "cuda.syncwarp()",
    "commit_copies()",
    "wait_for_copies()",
    "wait_for_copies_but_one()",
    "fence()",
    "wait_for_previous()",
)


def simulate(
    case: Case, *, kernels: Mapping[str, Kernel] | None = None, seed: int = 0
) -> dict[str, Array]:
    """Run a case; return its written arrays.

    `kernels` replaces the kernels of variants by name; `seed` draws the order of threads.
    """
    arrays = {
        name: array.copy() if name in case.written else array for name, array in case.arrays.items()
    }
    for one in case.launches:
        values = [arrays[a] if isinstance(a, str) else a for a in one.arguments]
        arguments = [
            _as_passed(kind, x) for kind, x in zip(one.variant.arguments, values, strict=True)
        ]
        written = [i for i, name in enumerate(one.arguments) if name in case.written]
        kernel = (kernels or {}).get(one.variant.name) or one.variant.kernel()
        launch(
            kernel,
            one.grid,
            one.variant.threads,
            arguments,
            written=written,
            begins_early=one.variant.expectation.begins_early,
            reads_early=one.variant.expectation.reads_early,
            seed=seed,
        )
    return {name: arrays[name] for name in case.written}


def _as_passed(kind: str, value: Any) -> Any:
    """Return an argument as a kernel receives it: arrays must have the pointer's element type."""
    if kind.endswith("*"):
        if value.dtype == np.dtype(kind[:-1]):
            return value
        raise TypeError(f"an array of {value.dtype} for a pointer to {kind[:-1]}")
    return np.dtype(kind).type(value)


class Source:
    """The source of a kernel's factory, to be broken in one place and made a kernel again.

    With `library`, a module of device functions that the kernel calls, it is that module's source
    that is broken. It may be the kernel's own module.
    """

    def __init__(
        self,
        module: ModuleType,
        factory: str,
        variant: Variant,
        library: ModuleType | None = None,
    ) -> None:
        self._module = module
        self._factory = inspect.getsource(getattr(module, factory))
        self._factory_name = factory
        self._variant = variant
        self._library = library
        self.text = self._factory if library is None else inspect.getsource(library)

    def synchronisations(self) -> list[int]:
        """Return the lines that hold a barrier, a commit or a wait."""
        return [
            i
            for i, line in enumerate(self.text.splitlines())
            if _statement(line) in SYNCHRONISATION
        ]

    def without(self, line: int) -> dict[str, Kernel]:
        """Return the kernel with one statement replaced by `pass`, as `simulate` wants it."""
        lines = self.text.splitlines()
        indent = len(lines[line]) - len(lines[line].lstrip())
        lines[line] = " " * indent + "pass"
        return self._kernel("\n".join(lines))

    def with_replaced(self, old: str, new: str) -> dict[str, Kernel]:
        """Return the kernel with one piece of its source replaced, as `simulate` wants it."""
        count = self.text.count(old)
        assert count == 1, f"{old!r} is {count} times in the source"
        return self._kernel(self.text.replace(old, new))

    def unbroken(self) -> dict[str, Kernel]:
        """Return the kernel made again from its own source."""
        return self._kernel(self.text)

    def _kernel(self, text: str) -> dict[str, Kernel]:
        names = dict(vars(self._module))
        # What the factory calls of its own module is to see what is broken, too.
        for name, value in vars(self._module).items():
            if isinstance(value, FunctionType) and value.__globals__ is vars(self._module):
                names[name] = FunctionType(
                    value.__code__, names, name, value.__defaults__, value.__closure__
                )
                names[name].__kwdefaults__ = value.__kwdefaults__
        factory = text
        if self._library is not None:
            of_library = {"__name__": self._library.__name__}
            exec(compile(text, inspect.getfile(self._library), "exec"), of_library)
            names |= {name: value for name, value in of_library.items() if name in names}
            if self._library is not self._module:
                factory = self._factory
        exec(compile(factory, inspect.getfile(self._module), "exec"), names)
        return {self._variant.name: names[self._factory_name](self._variant)}


class Sources:
    """The sources of one kernel that is written in several files, the factory's the first."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def count(self, piece: str) -> int:
        """Return how often a piece is in them."""
        return sum(source.text.count(piece) for source in self._sources)

    def with_replaced(self, old: str, new: str) -> dict[str, Kernel]:
        """Return the kernel with one piece replaced, wherever it is."""
        assert self.count(old) == 1, f"{old!r} is {self.count(old)} times in the sources"
        (source,) = (source for source in self._sources if old in source.text)
        return source.with_replaced(old, new)

    def unbroken(self) -> dict[str, Kernel]:
        """Return the kernel made again from all of them."""
        for source in self._sources[1:]:
            source.unbroken()
        return self._sources[0].unbroken()


def _statement(line: str) -> str:
    return line.split("#")[0].strip()
