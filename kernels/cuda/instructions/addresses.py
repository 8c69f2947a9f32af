"""Whole numbers of 64 bits for places in memory, computed where the source says.

The compiler takes what a loop needs as cheap to compute again, and places are sums of a dozen
instructions; ten of these in a loop of 200 are worth a register or two.
"""

from __future__ import annotations

from numba.cuda import types

from kernels.cuda.instructions.emit import I32, I64, Emitter, Value, instruction


def _kept(at: Emitter) -> Value:
    return at.assembly("mov.b64 $0, $1;", "=l,l", I64, at.arguments, has_effects=True)


# kept(number): the same int64, which is computed here and not where it is used.
kept = instruction(types.int64, [types.int64], _kept)


def _anew(at: Emitter) -> Value:
    return at.assembly("mov.b32 $0, $1;", "=r,r", I32, at.arguments, has_effects=True)


# anew(number): the same int32; what is made of it is computed behind here, each time one comes by,
# and not before a loop that has no register to keep it in.
anew = instruction(types.int32, [types.int32], _anew)


def _multiply_add_int32(at: Emitter) -> Value:
    return at.assembly("mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", I32, at.arguments)


# multiply_add_int32(a, b, c): a · b + c, all int32, where a source's product would be an int64.
multiply_add_int32 = instruction(types.int32, [types.int32] * 3, _multiply_add_int32)


def _multiply_add_wide(at: Emitter) -> Value:
    return at.assembly("mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", I64, at.arguments)


# multiply_add_wide(a, b, c): a · b + c, a and b int32, c and the sum int64; one instruction.
multiply_add_wide = instruction(
    types.int64, [types.int32, types.int32, types.int64], _multiply_add_wide
)
