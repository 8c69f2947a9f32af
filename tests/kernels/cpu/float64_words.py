"""Writing a float64 at an address, for operations of tests."""

from __future__ import annotations

from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import Builder, Value, store


@emitted(types.void, types.int64, types.float64)
def write_float64(builder: Builder, address: Value, value: Value) -> None:
    """Write a number."""
    store(builder, value, address, 8)
