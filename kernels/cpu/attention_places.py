"""The super-block that attention is at: how it is handed from one kernel to the next.

Attention goes through a context in *super-blocks* of 4 sub-blocks of 16 tokens, always from
position 0, and takes its rows 16 at a time through each. Where the sub-blocks lie, and what is to
be fetched meanwhile, stands in a *place list*, int64 words in scratch memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from llvmlite import ir
from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.vector_ir import (
    I32,
    I32X,
    I64,
    LANES,
    Builder,
    Value,
    broadcast,
    constant,
    i64,
    load,
    offset,
    store,
)

VECTOR_BYTES: Final = 64


class Place(IntEnum):
    """The words of a place list; entry j of 4 belongs to sub-block j."""

    KEYS = 0
    """Address of K. Sub-blocks behind the last one repeat it: their scores are never used."""
    VALUES = 4
    COUNTS = 8
    """Tokens of the sub-block to add: the first COUNTS of them, which some row sees (of the row
    block, or, where row blocks go side by side, of the item); weights of those a row does not see
    are 0 in tile registers, as are those before a window everywhere."""
    KEY_SCALES = 12
    """Pools of eight bits: address of the scales of K, and of V."""
    VALUE_SCALES = 16
    NEXT_KEYS = 20
    """What to fetch into the cache meanwhile: the same of the next super-block."""
    NEXT_VALUES = 24
    STARTS = 28
    """Position of the sub-block's first token."""
    SIZES = 32
    """Tokens the sub-block has room for; 0 if it is behind the last one."""
    FETCH = 36
    """Whether tile registers fetch what is next; vectors always do."""


def place(builder: Builder, places: Value, field: Place, index: Value | int) -> Value:
    """Load word `index` of a field of a place list."""
    if isinstance(index, int):
        return load(builder, offset(builder, places, 8 * (field + index)), I64, align=8)
    at = builder.add(places, builder.shl(index, i64(3)))
    return load(builder, offset(builder, at, 8 * field), I64, align=8)


@emitted(types.int64, types.int64, types.int64)
def word32(builder: Builder, address: Value, index: Value) -> Value:
    """Return int32 number `index` of those at `address`, as int64."""
    number = load(builder, builder.add(address, builder.shl(index, i64(2))), I32, align=4)
    return builder.sext(number, I64)


@emitted(types.void, *[types.int64] * 4)
def set_positions(
    builder: Builder, address: Value, index: Value, start: Value, size: Value
) -> None:
    """Write the positions of sub-block `index` to int32 [64] at `address`.

    They are start, start + 1, … of `size` tokens, and for the others one that no row sees.
    """
    lanes = ir.Constant(I32X, list(range(LANES)))
    positions = builder.add(lanes, broadcast(builder, builder.trunc(start, I32)))
    used = builder.icmp_signed("<", lanes, broadcast(builder, builder.trunc(size, I32)))
    positions = builder.select(used, positions, constant(I32X, 0x7FFFFFFF))
    store(builder, positions, offset(builder, address, builder.shl(index, i64(6))), VECTOR_BYTES)
