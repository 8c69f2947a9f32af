"""Atomic operations on int64 words, and waiting, for threads that work on one step together."""

from __future__ import annotations

import platform

from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import I64, VOID, Builder, Value, call, i32

WORD_BYTES = 8

yield_processor = types.ExternalFunction("sched_yield", types.int32())
"""Let another thread run: POSIX sched_yield(2)."""
read_descriptor = types.ExternalFunction(
    "read", types.int64(types.int32, types.int64, types.uint64)
)
"""POSIX read(2): (descriptor, address, bytes)."""
write_descriptor = types.ExternalFunction(
    "write", types.int64(types.int32, types.int64, types.uint64)
)
"""POSIX write(2): (descriptor, address, bytes)."""


def _word(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, I64.as_pointer())


@emitted(types.int64, types.int64)
def atomic_load(builder: Builder, address: Value) -> Value:
    """Return the word at an address; what its writer wrote before it is seen too (acquire)."""
    return builder.load_atomic(_word(builder, address), "acquire", WORD_BYTES)


@emitted(types.void, types.int64, types.int64)
def atomic_store(builder: Builder, address: Value, value: Value) -> None:
    """Write a word; whoever reads it sees everything written before it (release)."""
    builder.store_atomic(value, _word(builder, address), "release", WORD_BYTES)


@emitted(types.boolean, types.int64, types.int64, types.int64)
def compare_and_swap(builder: Builder, address: Value, expected: Value, value: Value) -> Value:
    """Write `value` if the word is still `expected`, and say whether it was (a full fence)."""
    pair = builder.cmpxchg(_word(builder, address), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 1)


@emitted(types.void)
def fence(builder: Builder) -> None:
    """Let no read or write before it move behind what follows, nor the other way round."""
    builder.fence("seq_cst")


@emitted(types.void)
def pause(builder: Builder) -> None:
    """Tell the processor that this is a waiting loop."""
    machine = platform.machine()
    if machine == "x86_64":
        call(builder, "llvm.x86.sse2.pause", VOID, [])
    elif machine == "aarch64":
        call(builder, "llvm.aarch64.hint", VOID, [i32(1)])
