"""Functions that operations are compiled from (`kernels.cpu.kernel_target`)."""

from __future__ import annotations

import numpy as np
import pytest
from numba import types

from kernels.cpu.compiled import inlined, operation
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.memory_words import read_float64, unfused
from kernels.cpu.vector_ir import Builder, Value, store


@emitted(types.void, types.int64, types.float64)
def write_float64(builder: Builder, address: Value, value: Value) -> None:
    """Write a number."""
    store(builder, value, address, 8)


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
