"""The handler of SIGILL: does an instruction on tiles in software and goes on behind it.

All of them have the same form, a VEX prefix of three bytes (Intel's manual, volume 2, 2.3):

    C4 │ ¬R ¬X ¬B, map 2 │ W 0, ¬vvvv, L 0, pp │ operation │ ModRM │ SIB and displacement, if any

LLVM makes no others for `kernels.cpu.amx_tiles`. Linux on x86-64 only.
"""

from __future__ import annotations

import ctypes
import signal
from typing import Final

import numpy as np
from numba import types

from kernels.cpu.atomics import write_descriptor
from kernels.cpu.compiled import inlined, int8_at, int32_at, int64_at, operation, uint8_at, word
from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import I64, Builder, Value, i64, offset
from tests.amx.registers import (
    REASONS,
    Fault,
    clear,
    configure,
    move,
    multiply,
    registers_of_this_thread,
    release,
)

INSTRUCTIONS: Final = (
    "LDTILECFG", "TILERELEASE", "TILEZERO", "TILELOADD", "TILESTORED", "TDPBF16PS", "TDPBSSD",
)  # fmt: skip
_REGISTERS_AT: Final = 40
"""Where the registers stand in a context (ucontext_t), 8 bytes each."""
_PLACES: Final = (13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7)
"""Where each general register does, by its number in instructions."""
_NEXT: Final = 16
"""Where the address of the instruction does."""
_STACK_POINTER: Final = 4
_OTHER: Final = int(Fault.OTHER)

_counts: Final = np.zeros(len(INSTRUCTIONS), np.int64)
_COUNTS_AT: Final = _counts.ctypes.data
_LINE_BYTES: Final = 100
_texts: Final = [f"AMX in software: {REASONS.get(fault, '')}" for fault in Fault]
_lines: Final = np.array([f"{text:{_LINE_BYTES - 1}}\n" for text in _texts], f"S{_LINE_BYTES}")
_LINES_AT: Final = _lines.ctypes.data
_ACTION_BYTES: Final = 152
_before: Final = ctypes.create_string_buffer(_ACTION_BYTES)
"""struct sigaction: handler, mask of 128 bytes, flags, what ends the handler."""
_BEFORE_AT: Final = ctypes.addressof(_before)
_FLAGS_AT: Final = 136
_SA_SIGINFO: Final = 4
_SIGILL: Final = int(signal.SIGILL)
_told: Final = np.array([2], np.int64)
_TOLD_AT: Final = _told.ctypes.data
"""Where faults are told of: a file descriptor."""

_set_action = types.ExternalFunction(
    "sigaction", types.int32(types.int32, types.int64, types.int64)
)


@inlined()
def _general(context: int, number: int) -> int:
    """Return a general register's value."""
    return word(context + _REGISTERS_AT, _PLACES[number])


@inlined()
def operand(context: int, code: int, extension: int) -> tuple[int, int, int]:
    """Return the address that an instruction names, what its index adds to it, and its length.

    code: address of the prefix; extension: its second byte.
    """
    form = uint8_at(code)[4]
    mode, base = form >> 6, form & 7
    length, has_index, index = 5, False, 0
    address, indexed = 0, 0
    if base == _STACK_POINTER:
        scaled = uint8_at(code)[5]
        length, base = 6, scaled & 7
        index = (scaled >> 3 & 7) | (0 if extension & 0x40 else 8)
        has_index = index != _STACK_POINTER
        if has_index:
            indexed = _general(context, index) << (scaled >> 6)
    if mode == 0 and base == 5:
        # No base: an address of its own, or, without an index byte, counted from the next one.
        address = int32_at(code + length)[0]
        length += 4
        if length == 9:
            address += code + length
        return address, indexed, length
    address = _general(context, base | (0 if extension & 0x20 else 8))
    if mode == 1:
        address += int8_at(code + length)[0]
        length += 1
    elif mode == 2:
        address += int32_at(code + length)[0]
        length += 4
    return address, indexed, length


@emitted(types.void, types.int64)
def _count(builder: Builder, number: Value) -> None:
    place = offset(builder, builder.shl(number, i64(3)), _COUNTS_AT)
    pointer = builder.inttoptr(place, I64.as_pointer())
    builder.atomic_rmw("add", pointer, i64(1), "monotonic")


@inlined()
def _perform(context: int, code: int) -> tuple[int, int]:
    """Do the instruction at an address; return the fault, if any, and the instruction's length."""
    at = uint8_at(code)
    if at[0] != 0xC4 or at[1] & 0x1F != 2 or at[2] & 0x84 != 0:
        return _OTHER, 0
    extension, prefix, kind, form = at[1], at[2] & 3, at[3], at[4]
    third = ~(at[2] >> 3) & 15
    register = (form >> 3 & 7) | (0 if extension & 0x80 else 8)
    second = (form & 7) | (0 if extension & 0x20 else 8)
    is_of_registers = form >> 6 == 3
    if kind == 0x49 and prefix == 0 and not is_of_registers:
        _count(0)
        address, indexed, length = operand(context, code, extension)
        return configure(address + indexed), length
    if kind == 0x49 and prefix == 0 and form == 0xC0:
        _count(1)
        return release(), 5
    registers = registers_of_this_thread()
    if kind == 0x49 and prefix == 3 and is_of_registers:
        _count(2)
        return clear(registers, register), 5
    if kind == 0x4B and prefix >= 2 and not is_of_registers:
        is_store = prefix == 2
        _count(4 if is_store else 3)
        address, indexed, length = operand(context, code, extension)
        return move(registers, register, address, indexed, is_store), length
    is_bf16 = kind == 0x5C
    if is_of_registers and ((is_bf16 and prefix == 2) or (kind == 0x5E and prefix == 3)):
        _count(5 if is_bf16 else 6)
        return multiply(registers, register, second, third, is_bf16), 5
    return _OTHER, 0


@operation(num_arguments=3)
def handle(number: int, about: int, context: int) -> None:  # noqa: ARG001
    """Handle SIGILL: what cannot be done is left to the handler before, and happens again.

    Instructions on tiles that follow at once are done too: a signal takes longer than they do.
    """
    begin = word(context + _REGISTERS_AT, _NEXT)
    code = begin
    fault, length = _perform(context, code)
    while fault == 0:
        code += length
        fault, length = _perform(context, code)
    if code == begin:
        if fault != _OTHER:
            write_descriptor(word(_TOLD_AT, 0), _LINES_AT + _LINE_BYTES * fault, _LINE_BYTES)
        _set_action(_SIGILL, _BEFORE_AT, 0)
    int64_at(context + _REGISTERS_AT)[_NEXT] = code


def install(told: int) -> None:
    """Handle SIGILL from now on, for all threads. `told`: where faults are told of."""
    _told[0] = told
    action = (ctypes.c_byte * _ACTION_BYTES)()
    ctypes.c_int64.from_buffer(action).value = handle.address
    ctypes.c_int32.from_buffer(action, _FLAGS_AT).value = _SA_SIGINFO
    assert ctypes.CDLL(None).sigaction(_SIGILL, action, _before) == 0


def counts() -> dict[str, int]:
    """Return how many of each instruction were done, by name."""
    return dict(zip(INSTRUCTIONS, _counts.tolist(), strict=True))
