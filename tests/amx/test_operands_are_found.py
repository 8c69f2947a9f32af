"""Where an instruction's operand is, in every form that the processor has."""

from __future__ import annotations

import numpy as np
import pytest

from tests.amx.marks import needs_tiles
from tests.amx.sets import missing

pytestmark = [needs_tiles, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

NAMES = (
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax",
    "rcx", "rsp", "rip",
)  # fmt: skip
"""The registers in the order of Linux's context (sys/ucontext.h)."""
REGISTERS = {name: 10_000_000 * (1 + place) for place, name in enumerate(NAMES)}
BEFORE = 5
"""Where they begin in it, in words of 8 bytes."""
CODES = [
    ("c4e2784907", "rdi", 0, "", 0),
    ("c4e278490424", "rsp", 0, "", 0),
    ("c4e27849442440", "rsp", 64, "", 0),
    ("c4e2784985 00f0ffff", "rbp", -4096, "", 0),
    ("c4c278490 4cc", "r12", 0, "rcx", 8),
    ("c4a27849044d 00100000", "", 4096, "r9", 2),
    ("c4e27b4b3c10", "rax", 0, "rdx", 1),
    ("c4827b4b4cbd00", "r13", 0, "r15", 4),
    ("c4e27b4b4c2408", "rsp", 8, "", 0),
    ("c4827a4b5c2080", "r8", -128, "r12", 1),
    ("c4e27a4b8475 00100000", "rbp", 4096, "rsi", 2),
]
"""Machine code as LLVM's assembler makes it; base, displacement, index and its factor."""


def found(code: bytes) -> tuple[int, int, int, int]:
    """Return what `operand` finds, and where the code lies."""
    from tests.amx.called_from_python import operand

    context = np.array([0] * BEFORE + list(REGISTERS.values()), np.int64)
    memory = np.frombuffer(code + b"\xa5" * 8, np.uint8)
    return *operand(context.ctypes.data, memory.ctypes.data, code[1]), memory.ctypes.data


@pytest.mark.parametrize(("text", "base", "displacement", "index", "factor"), CODES)
def test_an_operand_is_base_and_displacement_and_index(
    text: str, base: str, displacement: int, index: str, factor: int
) -> None:
    code = bytes.fromhex(text.replace(" ", ""))
    address, indexed, length, _ = found(code)
    assert address == REGISTERS.get(base, 0) + displacement
    assert indexed == REGISTERS.get(index, 0) * factor
    assert length == len(code)


def test_an_operand_may_be_counted_from_the_next_instruction() -> None:
    address, indexed, length, at = found(bytes.fromhex("c4e2784905f0ffffff"))
    assert (address, indexed, length) == (at + 9 - 16, 0, 9)
