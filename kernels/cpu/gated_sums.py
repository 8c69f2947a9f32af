"""How the sums of a gate · up product get out: gated, as the bfloat16 rows the next product reads.

A pair of panels is 16 columns of gate and the same 16 of up. While they are in the first-level
cache, silu(gate) · up is a matter of registers; written as float32 first, the two widest rows of a
layer would go to memory and come back. The bits are those of `row_inputs.gated_rows`.
"""

from __future__ import annotations

from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.row_values import gate_vector, rows_to_bf16
from kernels.cpu.vector_ir import (
    F32X,
    LANES,
    Builder,
    Value,
    counted_loop,
    i64,
    load,
    offset,
    store,
)


@emitted(types.void, *[types.int64] * 4)
def write_gated_block(
    builder: Builder, sums: Value, rows: Value, out: Value, stride: Value
) -> None:
    """Write silu(gate) · up of a block.

    sums: address of float32 [rows, 32], gate beside up. out: address of 16 bfloat16 of the first
    row, rows `stride` bytes apart.
    """

    def row(index: Value) -> None:
        gate_at = offset(builder, sums, builder.mul(index, i64(2 * 4 * LANES)))
        gate = load(builder, gate_at, F32X)
        up = load(builder, offset(builder, gate_at, 4 * LANES), F32X)
        halves = rows_to_bf16(builder, gate_vector(builder, gate, up))
        store(builder, halves, offset(builder, out, builder.mul(index, stride)))

    counted_loop(builder, rows, row)
