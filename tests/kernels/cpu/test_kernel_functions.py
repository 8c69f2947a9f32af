"""Functions that operations are compiled from (`kernels.cpu.kernel_target`)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from numba import carray

from kernels.cpu.compiled import float32_at, inlined, operation
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.kernel_target import kernel_function
from kernels.cpu.memory_words import read_float64, unfused
from tests.kernels.cpu.float64_words import write_float64


@unfused
def _rounded_twice(x: float, y: float, z: float) -> float:
    return x * y + z


@inlined()
def _rounded_as_is_fastest(x: float, y: float, z: float) -> float:
    return x * y + z


@operation(num_arguments=2)
def products(numbers: int, out: int) -> None:
    """Write x · y + z of three numbers, one way, and of the next three, the other way."""
    x, y, z = read_float64(numbers, 0), read_float64(numbers, 1), read_float64(numbers, 2)
    write_float64(out, _rounded_twice(x, y, z))
    x, y, z = read_float64(numbers, 3), read_float64(numbers, 4), read_float64(numbers, 5)
    write_float64(out + 8, _rounded_as_is_fastest(x, y, z))


def test_a_function_rounds_as_it_says_itself_and_not_as_who_calls_it() -> None:
    third = 1.0 / 3.0
    numbers, out = np.array(2 * [third, third, -third * third]), np.full(2, np.nan)
    products.to_function(2)(numbers.ctypes.data, out.ctypes.data)
    assert out[0] == 0.0
    has_fused = selected_instruction_set().name != "generic"
    assert (out[1] != 0.0) == has_fused


def test_python_is_told_that_it_cannot_call_one() -> None:
    with pytest.raises(TypeError, match="_rounded_twice is for compiled code to call"):
        _rounded_twice(1.0, 2.0, 3.0)


@operation(num_arguments=3)
def sum_of(numbers: int, count: int, out: int) -> None:
    """Write the sum of float32 [count], by what Numba has in Python for arrays."""
    write_float64(out, carray(float32_at(numbers), (count,)).sum())


def test_what_numba_itself_has_in_python_can_be_called() -> None:
    numbers, out = np.arange(5, dtype=np.float32), np.full(1, np.nan)
    sum_of.to_function(3)(numbers.ctypes.data, len(numbers), out.ctypes.data)
    assert out[0] == numbers.sum()


def _of_odd(count: int) -> int:
    return 0 if count == 0 else _of_even(count - 1)


def _of_even(count: int) -> int:
    return 1 if count == 0 else _of_odd(count - 1)


_of_odd, _of_even = kernel_function(_of_odd, frozenset()), kernel_function(_of_even, frozenset())


@operation(num_arguments=1)
def parity(count: int) -> None:
    """Call functions that call each other."""
    _of_odd(count)


def test_functions_that_call_each_other_in_a_circle_are_refused() -> None:
    with pytest.raises(TypeError, match=r"parity needs .*, which only Numba has"):
        _ = parity.address


NEIGHBOURS = """
import numba
from numba.core.runtime import rtsys
from kernels.cpu.compiled import object_code
object_code("step.dismiss")
assert rtsys.library.get_pointer_to_function("nrt_unresolved_abort")
"""


def test_numbas_own_functions_have_their_runtime_behind_a_kernel() -> None:
    subprocess.run([sys.executable, "-c", NEIGHBOURS], check=True)
