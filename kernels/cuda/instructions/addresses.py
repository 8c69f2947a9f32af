"""Whole numbers of 64 bits for places in memory, computed where the source says.

The compiler takes what a loop needs as cheap to compute again, and places are sums of a dozen
instructions; ten of these in a loop of 200 are worth a register or two.
"""

from __future__ import annotations

from numba.cuda import types

from kernels.cuda.instructions.emit import I64, Emitter, Value, instruction


def _kept(at: Emitter) -> Value:
    return at.assembly("mov.b64 $0, $1;", "=l,l", I64, at.arguments, has_effects=True)


# kept(number): the same int64, which is computed here and not where it is used.
kept = instruction(types.int64, [types.int64], _kept)


def _multiply_add_wide(at: Emitter) -> Value:
    return at.assembly("mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", I64, at.arguments)


# multiply_add_wide(a, b, c): a · b + c, a and b int32, c and the sum int64; one instruction.
multiply_add_wide = instruction(
    types.int64, [types.int32, types.int32, types.int64], _multiply_add_wide
)
