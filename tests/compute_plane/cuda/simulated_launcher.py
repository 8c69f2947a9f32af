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
    """A `Launcher`. `launched`: names and grids, in order. `runs`: not only noted, but run.

    What a kernel reads before it waits for the launch ahead no kernel may have written.
    """

    device = torch.device("cpu")
    num_multiprocessors = 132
    fetches_ahead = True

    def __init__(self, *, runs: bool = True) -> None:
        self.runs = runs
        self.prepared: list[str] = []
        self.launched: list[tuple[str, tuple[int, int, int]]] = []
        self._written: dict[tuple[int, int], np.ndarray] = {}
        """By first address and the one behind the last; kept, so that nothing else comes there."""

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
            self._refuse_written(variant, passed)
            arrays = [array for array in passed if isinstance(array, np.ndarray)]
            before = [array.tobytes() for array in arrays]
            launch(
                variant.kernel(),
                grid,
                variant.threads,
                passed,
                written=written,
                begins_early=variant.expectation.begins_early,
                reads_early=variant.expectation.reads_early,
            )
            for array, as_it_was in zip(arrays, before, strict=True):
                if array.tobytes() != as_it_was:
                    self._written[np.lib.array_utils.byte_bounds(array)] = array

    def _refuse_written(self, variant: Variant, passed: Sequence[np.ndarray | np.generic]) -> None:
        for i in variant.expectation.reads_early:
            first, end = np.lib.array_utils.byte_bounds(passed[i])
            overlapping = [one for one in self._written if one[0] < end and first < one[1]]
            assert not overlapping, f"argument {i} of {variant.name} was written by a kernel"

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


def as_passed(kind: str, argument: Tensor | float) -> np.ndarray | np.generic:
    """Return an argument as a kernel receives it: a tensor's memory as the pointer's elements.

    Of one whose rows are parts of another's, from its first element to its last.
    """
    if not kind.endswith("*"):
        assert not isinstance(argument, Tensor)
        return np.dtype(kind).type(argument)
    assert isinstance(argument, Tensor)
    if not argument.is_contiguous():
        extent = sum(
            (size - 1) * step for size, step in zip(argument.shape, argument.stride(), strict=True)
        )
        argument = argument.as_strided((extent + 1,), (1,))
    wanted = np.dtype(kind[:-1])
    # Only block copies read a tensor as something else than it is.
    assert wanted == np.uint32 or wanted.itemsize == argument.element_size()
    bits = argument.view(BITS.get(argument.dtype, argument.dtype))
    return bits.numpy().reshape(-1).view(wanted)
