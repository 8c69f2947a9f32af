"""Kernels launched on CPU tensors in the simulator of `tests.simt`, as a device would run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.cuda.variant import Variant
from tests.simt import launch

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float8_e4m3fn: torch.uint8}
"""What NumPy has instead of torch's dtypes."""


class SimulatedLauncher:
    """A `Launcher`. `launched`: names and grids, in order. `runs`: not only noted, but run."""

    device = torch.device("cpu")
    num_multiprocessors = 132
    fetches_ahead = True

    def __init__(self, *, runs: bool = True) -> None:
        self.runs = runs
        self.prepared: list[str] = []
        self.launched: list[tuple[str, tuple[int, int, int]]] = []

    def prepare(self, variants: Sequence[Variant]) -> None:
        self.prepared += [variant.name for variant in variants]

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        assert variant.name in self.prepared
        self.launched.append((variant.name, grid))
        passed = [
            as_passed(kind, argument)
            for kind, argument in zip(variant.arguments, arguments, strict=True)
        ]
        if self.runs and 0 not in grid:
            written = range(len(passed))
            launch(
                variant.kernel(),
                grid,
                variant.threads,
                passed,
                written=written,
                begins_early=variant.expectation.begins_early,
            )

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def as_passed(kind: str, argument: Tensor | float) -> np.ndarray | np.generic:
    """Return an argument as a kernel receives it: a tensor's memory as the pointer's elements."""
    if not kind.endswith("*"):
        assert not isinstance(argument, Tensor)
        return np.dtype(kind).type(argument)
    assert isinstance(argument, Tensor)
    assert argument.is_contiguous()
    wanted = np.dtype(kind[:-1])
    # Only block copies read a tensor as something else than it is.
    assert wanted == np.uint32 or wanted.itemsize == argument.element_size()
    bits = argument.view(BITS.get(argument.dtype, argument.dtype))
    return bits.numpy().reshape(-1).view(wanted)
