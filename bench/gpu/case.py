"""A drawn problem for a kernel: its memory, its launches, and what must come out.

A case is what runs a kernel without knowing it: the simulator of the tests and the GPU take the
same one. Cases are as hostile as real memory can be: whatever a kernel must not read is poison (NaN
in slots past a row's end and in blocks nobody owns, block ids far outside the pool), outputs start
as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cuda.variant import Variant

Array = npt.NDArray[Any]

# Largest absolute error on normally distributed data. Outputs reach magnitude 4 (a row of one token
# is its value), where a bfloat16 result is rounded by up to 2⁻⁷ and a float16 one by 2⁻¹⁰.
TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the kernel's arguments in order, an array by its name in the case."""

    variant: Variant
    grid: tuple[int, int, int]
    arguments: tuple[str | int | float, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """What one written array must hold in the end.

    `dtype` names the stored elements ("bfloat16", …, or an integer type); `values` are exact, in
    float64 or integers. An error up to `tolerance` is right; where a value is NaN the array must
    hold NaN. `decode` gives the values of what is stored, where it takes more than its dtype.
    """

    dtype: str
    values: Array
    tolerance: float
    decode: Callable[[Array], Array] | None = None

    def error(self, stored: Array) -> float:
        """Return the largest absolute difference; NaN against a number is infinitely wrong."""
        found = to_float64(self.dtype, stored) if self.decode is None else self.decode(stored)
        exact = self.values.astype(np.float64)
        both_nan = np.isnan(found) & np.isnan(exact)
        both_infinite = np.isinf(found) & (found == exact)
        with np.errstate(invalid="ignore"):
            difference = np.abs(found - exact)
        difference = np.where(np.isnan(difference), np.inf, difference)
        return float(np.where(both_nan | both_infinite, 0.0, difference).max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Case:
    """Arrays by name, launches in order, and what the written arrays must hold.

    `expected` is judged; `scratch` names arrays that may be written besides. All others are
    read-only. `part`, if given, is a smaller case whose outputs must have the very bits that this
    one has there: it maps this case's outputs to the part's.
    """

    name: str
    arrays: Mapping[str, Array]
    launches: tuple[Launch, ...]
    expected: Mapping[str, Expected]
    scratch: tuple[str, ...] = ()
    part: tuple[Case, Callable[[Mapping[str, Array]], Mapping[str, Array]]] | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the arrays that the kernels may write."""
        return (*self.expected, *self.scratch)

    def errors(self, outputs: Mapping[str, Array]) -> dict[str, float]:
        """Return the largest error of each judged array."""
        return {name: self.expected[name].error(outputs[name]) for name in self.expected}

    def faults(self, outputs: Mapping[str, Array]) -> list[str]:
        """Say which arrays are wrong and by how much; empty if none is."""
        return [
            f"{name}: error {error:.3g} exceeds {self.expected[name].tolerance:.3g}"
            for name, error in self.errors(outputs).items()
            if not error <= self.expected[name].tolerance
        ]


# Runs a case; returns its written arrays as stored, by name, and leaves the case as it is.
Runner = Callable[[Case], Mapping[str, Array]]


def poison(dtype: str, shape: tuple[int, ...]) -> Array:
    """Return an output as it is before the launch: NaN, or a value no kernel gives."""
    if dtype == "float32":
        return np.full(shape, np.nan, np.float32)
    if dtype in ("float16", "bfloat16"):
        return np.full(shape, 0x7FFF, np.uint16)  # NaN in both
    return np.full(shape, np.iinfo(dtype).max // 3 * 2, dtype)


def to_stored(dtype: str, values: Array) -> Array:
    """Round values to the elements a tensor of `dtype` holds, 16-bit floats as their bits."""
    single = np.asarray(values, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return single.astype(np.float16).view(np.uint16)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(single), 0x7FFF, rounded).astype(np.uint16)


def to_float64(dtype: str, stored: Array) -> Array:
    """Widen stored elements, exactly."""
    if dtype == "float16":
        stored = stored.view(np.float16)
    elif dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float64)
