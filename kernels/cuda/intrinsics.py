"""The instructions our kernels need and Numba does not offer by itself.

An intrinsic is typed in Python and emitted as LLVM IR where the kernel calls it: no function call
is left, nothing is linked. `InlineAsm` names one PTX instruction; its constraint string gives the
result first (`=f`), then the operands: `f` a float32 register, `h` one of 16 bits.
Everything else Numba has natively: `cuda.shfl_xor_sync`, `cuda.syncthreads`, shared arrays.

The 16-bit types travel as bits in a uint16:

    bfloat16   s eeeeeeee fffffff           the upper half of a float32
    float16    s eeeee ffffffffff
    float32    s eeeeeeee fffffffffffffffffffffff
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import float32, uint16
from numba.cuda.extending import intrinsic

FULL_WARP = 0xFFFFFFFF  # mask of the 32 lanes that take part in a warp instruction

# Numba and llvmlite are untyped.
_NumbaType: TypeAlias = Any
_Builder: TypeAlias = Any
_Value: TypeAlias = Any
_Intrinsic: TypeAlias = Any

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_F16, _F32 = ir.HalfType(), ir.FloatType()


def _unary(
    result: _NumbaType, argument: _NumbaType, emit: Callable[[_Builder, _Value], _Value]
) -> _Intrinsic:
    """Make an intrinsic of one argument whose LLVM IR `emit` writes."""

    @intrinsic
    def instruction(typingctx: _NumbaType, x: _NumbaType) -> _NumbaType:  # noqa: ARG001 - Numba's form
        def codegen(
            _context: _Value, builder: _Builder, _signature: _Value, arguments: list[_Value]
        ) -> _Value:
            return emit(builder, arguments[0])

        return result(argument), codegen

    return instruction


def _exp2(builder: _Builder, x: _Value) -> _Value:
    one_float = ir.FunctionType(_F32, [_F32])
    return builder.call(ir.InlineAsm(one_float, "ex2.approx.ftz.f32 $0, $1;", "=f,f"), [x])


def _bfloat16_to_float32(builder: _Builder, bits: _Value) -> _Value:
    upper_half = builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 16))
    return builder.bitcast(upper_half, _F32)


def _float32_to_bfloat16(builder: _Builder, x: _Value) -> _Value:
    float_to_bits = ir.FunctionType(_I16, [_F32])
    return builder.call(ir.InlineAsm(float_to_bits, "cvt.rn.bf16.f32 $0, $1;", "=h,f"), [x])


def _float16_to_float32(builder: _Builder, bits: _Value) -> _Value:
    return builder.fpext(builder.bitcast(bits, _F16), _F32)


def _float32_to_float16(builder: _Builder, x: _Value) -> _Value:
    return builder.bitcast(builder.fptrunc(x, _F16), _I16)


# exp2(x) = 2ˣ by the special-function unit, to two units in the last place; 2^-∞ = 0. Softmax uses
# it on scores multiplied by log2(e) beforehand: eˢ = 2^(s·log2 e).
exp2 = _unary(float32, float32, _exp2)

# bfloat16_to_float32(bits) is exact: a shift.
bfloat16_to_float32 = _unary(float32, uint16, _bfloat16_to_float32)

# float32_to_bfloat16(x) rounds ties to even; one instruction, from compute capability 8.0 on.
float32_to_bfloat16 = _unary(uint16, float32, _float32_to_bfloat16)

# float16_to_float32(bits) is exact.
float16_to_float32 = _unary(float32, uint16, _float16_to_float32)

# float32_to_float16(x) rounds ties to even; what is too large becomes infinity.
float32_to_float16 = _unary(uint16, float32, _float32_to_float16)

# dtype of a tensor → (stored element to float32, float32 to stored element).
CONVERSIONS: dict[str, tuple[_Intrinsic, _Intrinsic]] = {
    "float32": (float32, float32),
    "float16": (float16_to_float32, float32_to_float16),
    "bfloat16": (bfloat16_to_float32, float32_to_bfloat16),
}
