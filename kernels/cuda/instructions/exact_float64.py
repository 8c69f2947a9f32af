"""float64 operations rounded once each, never fused; and the bits of a float64.

The compiler may fuse a product and a sum into one operation, which rounds once less. Where results
must have the same bits on every device (`kernels.reference.exponential`), these are used.
"""

from __future__ import annotations

from llvmlite import ir
from numba import float64, int64

from kernels.cuda.instructions.emit import I64, Emitter, Intrinsic, Value, instruction

_F64 = ir.DoubleType()


def _rounded(operation: str) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        return at.assembly(f"{operation}.rn.f64 $0, $1, $2;", "=d,d,d", _F64, at.arguments)

    return instruction(float64, [float64, float64], emit)


# add_float64(a, b), multiply_float64(a, b), divide_float64(a, b): rounded to nearest, by
# themselves.
add_float64 = _rounded("add")
multiply_float64 = _rounded("mul")
divide_float64 = _rounded("div")

# bits_to_float64(bits), float64_to_bits(x): the 64 bits, as they are.
bits_to_float64 = instruction(
    float64, [int64], lambda at: at.builder.bitcast(at.arguments[0], _F64)
)
float64_to_bits = instruction(int64, [float64], lambda at: at.builder.bitcast(at.arguments[0], I64))
