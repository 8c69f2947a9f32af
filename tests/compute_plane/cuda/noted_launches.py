"""What a device's stream has in a step: launches of kernels and torch's own, what they touch.

Nothing is run. A kernel that begins early waits for the launch directly ahead of it, which may have
begun early, too: so several may be under way at once, back to one that began when all ahead of it
had ended (ADR 0031). What is read before the wait none of them may write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.cuda.variant import Variant
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher

Bytes = tuple[int, int]
"""Addresses of the first one and of that behind the last."""


@dataclass(frozen=True)
class Launch:
    """What a launch writes, and what it reads before its wait, by argument.

    `begins_early`: it may begin before the one ahead of it has ended. `kind`: a kernel's, and
    `given` its arguments.
    """

    name: str
    begins_early: bool = False
    writes: Sequence[Bytes] = ()
    reads_early: dict[int, Bytes] = field(default_factory=dict)
    kind: type | None = None
    given: Sequence[Any] = ()


@dataclass(frozen=True)
class Hazard:
    """An argument that a kernel reads before its wait, and what may still be writing it."""

    kind: type | None
    reader: str
    argument: int
    writer: str


def read_too_early(launches: Sequence[Launch]) -> list[Hazard]:
    """Return what is read before a wait and written by launches that may be under way."""
    return [
        Hazard(one.kind, one.name, argument, other.name)
        for number, one in enumerate(launches)
        if one.reads_early
        for other in under_way(launches[:number])
        for argument, memory in one.reads_early.items()
        if any(meet(memory, written) for written in other.writes)
    ]


def under_way(launches: Sequence[Launch]) -> list[Launch]:
    """Return those of which one that is launched behind them may not see what they write."""
    found = []
    for one in reversed(launches):
        found.append(one)
        if not one.begins_early:
            break
    return found


def meet(one: Bytes, other: Bytes) -> bool:
    return one[0] < other[1] and other[0] < one[1]


class NotedLaunches(TorchDispatchMode):
    """Notes launches in order, torch's while it is on. Memory that torch makes is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._made: list[Tensor] = []
        """Kept, so that nothing else comes there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tensors_of((args, kwargs))}
        made = [one for one in tensors_of(found) if one.untyped_storage().data_ptr() not in given]
        self._made += made
        name = str(func)
        if name.startswith(("aten.empty", "aten.new_empty")):
            for one in made:
                one.zero_()
            return found
        written = tensors_of(found) if func._schema.is_mutable else made
        if written:
            self.launches.append(Launch(name, writes=[bytes_of(one) for one in written]))
        return found


class NotedLauncher(SimulatedLauncher):
    """A `Launcher` that notes launches among torch's.

    Whatever a kernel is given but reads early counts as written by it.
    """

    def __init__(self, noted: NotedLaunches) -> None:
        super().__init__(runs=False)
        self._noted = noted

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        super().launch(variant, grid, *arguments)
        if 0 in grid:
            return
        expected = variant.expectation
        touched = {i: bytes_of(one) for i, one in enumerate(arguments) if is_tensor(one)}
        early = {i: touched[i] for i in expected.reads_early}
        # What stands in for an argument that a variant has not may be read early as another one.
        writes = [one for one in touched.values() if one not in early.values()]
        self._noted.launches.append(
            Launch(variant.name, expected.begins_early, writes, early, type(variant), arguments)
        )


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def tensors_of(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Any) -> Bytes:
    """Return where a tensor lies, from its first element to its last."""
    if not tensor.numel():
        return 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * step for size, step in steps)
    first = int(tensor.data_ptr())
    return first, first + elements * int(tensor.element_size())
