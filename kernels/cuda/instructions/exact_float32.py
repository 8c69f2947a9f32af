"""float32 operations that are never fused, but where they say so; see `exact_float64`."""

from __future__ import annotations

from numba import float32

from kernels.cuda.instructions.emit import F32, Emitter, Intrinsic, Value, instruction


def _rounded(operation: str) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        return at.assembly(f"{operation}.rn.f32 $0, $1, $2;", "=f,f,f", F32, at.arguments)

    return instruction(float32, [float32, float32], emit)


# add_float32(a, b), multiply_float32(a, b), divide_float32(a, b): rounded to nearest, by
# themselves.
add_float32 = _rounded("add")
multiply_float32 = _rounded("mul")
divide_float32 = _rounded("div")


def _multiply_add(at: Emitter) -> Value:
    return at.assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", F32, at.arguments)


# multiply_add(a, b, c): a · b + c, rounded once.
multiply_add = instruction(float32, [float32, float32, float32], _multiply_add)
