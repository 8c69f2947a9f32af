"""Cases whose memory is too large for a test: what kernels touch of it, lying far apart."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence

import pytest

from bench.gpu.case import Array, Case, Launch
from tests.kernels.cuda.compiled import run_compiled
from tests.kernels.cuda.simulation import simulate
from tests.simt.memory import Spread

FAR = 2**32 + 2**12  # neither 32 bits with a sign nor without hold a multiple of it
LARGEST_BLOCK = 2**31 - 2**12  # its stride is 32 bits with a sign, where the third begins is not
RUNS = pytest.mark.parametrize(
    "run",
    [simulate, pytest.param(run_compiled, marks=pytest.mark.slow)],
    ids=["source", "compiled"],
)


def parameters_of(launch: Launch) -> list[str]:
    """Return what the launch's kernel calls its arguments."""
    return list(inspect.signature(launch.variant.kernel()).parameters)


def with_argument(case: Case, parameter: str, value: int) -> Case:
    """Return the case with one argument changed, in every launch that has it."""
    launches = []
    for one in case.launches:
        names = parameters_of(one)
        arguments = [
            value if name == parameter else argument
            for name, argument in zip(names, one.arguments, strict=True)
        ]
        launches.append(dataclasses.replace(one, arguments=tuple(arguments)))
    assert any(parameter in parameters_of(one) for one in launches)
    return dataclasses.replace(case, launches=tuple(launches))


def placed(case: Case, name: str, starts: Sequence[int]) -> Case:
    """Return the case with the rows of an array at these elements of a larger one."""
    pieces = Spread(case.arrays[name], tuple(starts))
    assert len(pieces.starts) == len(pieces.values)
    return dataclasses.replace(case, arrays={**case.arrays, name: pieces}, part=None)


def spread(case: Case, name: str, parameter: str, far: int = FAR) -> Case:
    """Return the case with the rows of an array `far` apart, and the argument that says so."""
    starts = [far * row for row in range(len(case.arrays[name]))]
    return with_argument(placed(case, name, starts), parameter, far)


def moved(case: Case, name: str, first: int) -> Case:
    """Return the case with the rows of an array behind `first` others of as many elements."""
    array = case.arrays[name]
    size = array[0].size
    return placed(case, name, [(first + row) * size for row in range(len(array))])


def faults(case: Case, run: Callable[[Case], dict[str, Array]]) -> list[str]:
    """Return what is wrong with what a case leaves."""
    outputs = run(case)
    return case.faults(
        {name: x.values if isinstance(x, Spread) else x for name, x in outputs.items()}
    )
