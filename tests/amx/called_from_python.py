"""The software's functions for Python to call: operations that write what they return."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.cpu.compiled import int64_at, operation
from kernels.cpu.operation import Operation
from tests.amx import registers, trap

Fault = registers.Fault


@operation(num_arguments=4)
def _operand(context: int, code: int, extension: int, out: int) -> None:
    address, indexed, length = trap.operand(context, code, extension)
    int64_at(out)[0], int64_at(out)[1], int64_at(out)[2] = address, indexed, length


@operation(num_arguments=1)
def _registers_of_this_thread(out: int) -> None:
    int64_at(out)[0] = registers.registers_of_this_thread()


@operation(num_arguments=1)
def _release(out: int) -> None:
    int64_at(out)[0] = registers.release()


@operation(num_arguments=2)
def _configure(source: int, out: int) -> None:
    int64_at(out)[0] = registers.configure(source)


@operation(num_arguments=3)
def _clear(at: int, number: int, out: int) -> None:
    int64_at(out)[0] = registers.clear(at, number)


@operation(num_arguments=6)
def _move(at: int, number: int, memory: int, stride: int, is_store: int, out: int) -> None:
    int64_at(out)[0] = registers.move(at, number, memory, stride, is_store != 0)


@operation(num_arguments=6)
def _multiply(at: int, total: int, rows: int, columns: int, is_bf16: int, out: int) -> None:
    int64_at(out)[0] = registers.multiply(at, total, rows, columns, is_bf16 != 0)


def _called(made: Operation, *arguments: int) -> list[int]:
    out = np.zeros(3, np.int64)
    made.to_function(len(arguments) + 1)(*arguments, out.ctypes.data)
    return [int(number) for number in out]


def operand(context: int, code: int, extension: int) -> list[int]:
    """`trap.operand`."""
    return _called(_operand, context, code, extension)


def _function(made: Operation) -> Callable[..., int]:
    return lambda *arguments: _called(made, *arguments)[0]


registers_of_this_thread = _function(_registers_of_this_thread)
release = _function(_release)
configure = _function(_configure)
clear = _function(_clear)
move = _function(_move)
multiply = _function(_multiply)
