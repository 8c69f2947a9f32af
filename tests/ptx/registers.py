"""The registers of all lanes of a launch: one array a register, one element a lane.

A register is bits; an instruction looks at them as the type it names. Registers begin as poison
(NaN in floats, large odd numbers otherwise). What is read before it is written is found ahead of
the run, from the text: see `find_unwritten`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.faults import Uninitialised, Unsupported
from tests.ptx.program import (
    SIZES,
    Address,
    Constant,
    Group,
    Instruction,
    Operand,
    Pair,
    Program,
    Register,
)

Array = npt.NDArray[Any]

_KINDS = {"u": "u", "s": "i", "b": "u", "f": "f"}
DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(f"{_KINDS[name[0]]}{size}") for name, size in SIZES.items() if name != "f8"
}
DTYPES["pred"] = np.dtype(np.bool_)

POISON = 0x7FF7_F00D_FFB7_F00D  # NaN in the types of 16, 32 and 64 bits


class Registers:
    """The registers of `lanes` threads, and constants as arrays of as many."""

    def __init__(self, program: Program, lanes: int) -> None:
        self._lanes = lanes
        self._arrays: dict[str, Array] = {}
        self._constants: dict[tuple[int, str], Array] = {}
        for name, kind in program.registers.items():
            if kind == "pred":
                self._arrays[name] = np.ones(lanes, np.bool_)
            else:
                dtype = np.dtype(f"u{SIZES[kind]}")
                self._arrays[name] = np.full(lanes, POISON & (1 << 8 * SIZES[kind]) - 1, dtype)

    def read(self, operand: Operand, kind: str, where: object) -> Array:
        """Return an operand's values: a view that follows the register.

        Of a register wider than the type, the lower bits; a narrower one is an error.
        """
        dtype = DTYPES[kind]
        if isinstance(operand, Register):
            array = self._array(operand, where)
            if (dtype == np.bool_) != (array.dtype == np.bool_) or array.itemsize < dtype.itemsize:
                raise Unsupported(f"{where}: {operand.name} as .{kind}")
            if operand.negated:
                raise Unsupported(f"{where}: a negated operand")
            if array.itemsize == dtype.itemsize:
                return array.view(dtype)
            return array.view(dtype)[:: array.itemsize // dtype.itemsize]
        if isinstance(operand, Constant):
            return self.constant(operand.value, kind)
        raise Unsupported(f"{where}: an operand of .{kind} is expected, not {operand}")

    def constant(self, value: int, kind: str) -> Array:
        """Return a constant's array; of a float `value` is the bits."""
        key = (value, kind)
        if key not in self._constants:
            dtype = DTYPES[kind]
            if dtype == np.bool_:
                array: Array = np.full(self._lanes, bool(value))
            else:
                bits = value & (1 << 8 * dtype.itemsize) - 1
                array = np.full(self._lanes, bits, f"u{dtype.itemsize}").view(dtype)
            array.flags.writeable = False
            self._constants[key] = array
        return self._constants[key]

    def write(self, operand: Operand, kind: str, where: object) -> Array:
        """Return what results of a type are copied into.

        A wider register takes them as the type extends them, by zeros or by the sign.
        """
        if not isinstance(operand, Register) or operand.negated:
            raise Unsupported(f"{where}: a result register is expected, not {operand}")
        array, dtype = self._array(operand, where), DTYPES[kind]
        is_predicate = array.dtype == np.bool_
        if is_predicate != (dtype == np.bool_) or array.itemsize < dtype.itemsize:
            raise Unsupported(f"{where}: {operand.name} as .{kind}")
        if is_predicate or array.itemsize == dtype.itemsize:
            return array.view(dtype)
        if kind.startswith("f"):
            raise Unsupported(f"{where}: {operand.name} as .{kind}")
        return array.view(f"{dtype.kind}{array.itemsize}")

    def _array(self, operand: Register, where: object) -> Array:
        if operand.name not in self._arrays:
            raise Unsupported(f"{where}: {operand.name} is not declared")
        return self._arrays[operand.name]


def registers_of(operand: Operand) -> list[str]:
    """Return the names of the registers in an operand."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Pair):
        return [operand.first.name, operand.second.name]
    if isinstance(operand, Group):
        return [name for item in operand.items for name in registers_of(item)]
    if isinstance(operand, Address):
        return registers_of(operand.base)
    return []


_WITHOUT_RESULT = ("st.", "bra", "ret", "bar.", "cp.async", "red.", "membar", "fence")


def results_and_operands(instruction: Instruction) -> tuple[list[str], list[str]]:
    """Return the names of the registers that an instruction writes, and that it reads."""
    operands = instruction.operands
    has_result = bool(operands) and not instruction.opcode.startswith(_WITHOUT_RESULT)
    written = registers_of(operands[0]) if has_result else []
    read = [name for operand in operands[has_result:] for name in registers_of(operand)]
    if instruction.guard is not None:
        read.append(instruction.guard.name)
    return written, read


def find_unwritten(program: Program) -> None:
    """Refuse a program that reads a register which no path to there has written.

    Raises Uninitialised. A register that only some paths write is let through: the compiler leaves
    those that nobody looks at, and poison tells where somebody does.
    """
    bit_of = {name: 1 << i for i, name in enumerate(program.registers)}
    count = len(program.instructions)
    effects = [results_and_operands(one) for one in program.instructions]
    arriving: list[int | None] = [None] * (count + 1)
    left = [(0, 0)]
    while left:
        index, written = left.pop()
        while index < count:
            before = arriving[index]
            if before is not None and written | before == before:
                break
            written |= before or 0
            arriving[index] = written
            one = program.instructions[index]
            for name in effects[index][0]:
                written |= bit_of[name]
            if one.opcode.startswith("bra"):
                left.append((program.labels[one.label], written))
                if one.guard is None:
                    break
            elif one.opcode in ("ret", "exit") and one.guard is None:
                break
            index += 1
    for index, written_before in enumerate(arriving[:count]):
        if written_before is None:
            continue  # not reached
        for name in effects[index][1]:
            if not written_before & bit_of[name]:
                one = program.instructions[index]
                raise Uninitialised(f"{one}: {name} was never written")
