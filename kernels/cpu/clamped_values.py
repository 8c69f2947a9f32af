"""The gate of gpt-oss's experts, as LLVM IR (`kernels.reference.clamped_mul`).

    g = min(gate, 7)    u = max(−7, min(up, 7))    g / (1 + e^(−1.702 · g)) · (u + 1)

A NaN stays one, whatever it is compared with.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.operands import RowFormat
from kernels.cpu.row_values import HIGHEST_EXPONENT, Pair, load_pair
from kernels.cpu.vector_ir import F32X, Builder, Value, call, constant, exp, fma
from kernels.reference.clamped_mul import LIMIT, SLOPE

ONE: Final = 1.0


def clamped_gated(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
    """Return what is gated; sources: gate, up, and what is added to each of them before."""
    gates, ups, gate_biases, up_biases = (load_pair(builder, source) for source in sources)
    first, second = (
        _gated(builder, builder.fadd(gate, gate_bias), builder.fadd(up, up_bias))
        for gate, up, gate_bias, up_bias in zip(gates, ups, gate_biases, up_biases, strict=True)
    )
    return first, second


def _gated(builder: Builder, gate: Value, up: Value) -> Value:
    gate = _at_most(builder, gate)
    up = builder.fneg(_at_most(builder, builder.fneg(_at_most(builder, up))))
    scaled = builder.fmul(gate, constant(F32X, -SLOPE))
    highest = constant(F32X, HIGHEST_EXPONENT)
    power = exp(builder, call(builder, "llvm.minnum.v16f32", F32X, [scaled, highest]))
    swish = builder.fdiv(gate, builder.fadd(power, constant(F32X, ONE)))
    return fma(builder, swish, up, swish)


def _at_most(builder: Builder, x: Value) -> Value:
    limit = constant(F32X, LIMIT)
    return builder.select(builder.fcmp_ordered(">", x, limit), limit, x)
