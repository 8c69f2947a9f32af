"""What attention and MLP of Gemma add to the hidden states: their output, normalised first.

    hidden += rms_norm(output)

Specification: `kernels.reference.rms_norm`, within rounding; sums of squares run in the lanes of
`kernels.cpu.row_values`. A chunk is a run of rows.
"""

from __future__ import annotations

from numba import types

from kernels.cpu.compiled import operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.operands import NormedSum, RowFormat
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import (
    GroupValues,
    Pair,
    inverse_root_mean_square,
    load_pair,
    write_row,
)
from kernels.cpu.vector_ir import F32, I32, Builder, Value, broadcast, fma, i64


def _added(scale: Value) -> GroupValues:
    """Return the values x · scale · weight + hidden; sources: x, weight, hidden.

    Product and sum are rounded together: a compiler that may join them does so on some sets only.
    """

    def values(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
        factor = broadcast(builder, scale)
        x, weight, hidden = (load_pair(builder, source) for source in sources)
        first, second = (
            fma(builder, builder.fmul(a, factor), w, h)
            for a, w, h in zip(x, weight, hidden, strict=True)
        )
        return first, second

    return values


@emitted(types.void, *[types.int64] * 5)
def add_normed_row(
    builder: Builder, source: Value, k: Value, weight: Value, epsilon: Value, hidden: Value
) -> None:
    """Add rms_norm of a row of k float32 to another one. `epsilon`: the bits of a float32."""
    bits = builder.bitcast(builder.trunc(epsilon, I32), F32)
    scale = inverse_root_mean_square(builder, source, k, bits)
    outs = [hidden, *[i64(0)] * 4]
    sources = [source, weight, hidden]
    write_row(builder, _added(scale), sources, k, i64(RowFormat.FLOAT32), outs)


@operation()
def add_normed_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add rms_norm of a piece's rows to its hidden rows."""
    k = word(record, NormedSum.K)
    num_rows = word(header, StepWord.NUM_TOKENS)
    hidden = word(record, NormedSum.HIDDEN) + 4 * k * word(header, StepWord.FIRST_TOKEN)
    for row in range(num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks):
        add_normed_row(
            word(record, NormedSum.SOURCE) + 4 * k * row, k, word(record, NormedSum.WEIGHT),
            word(record, NormedSum.EPSILON), hidden + 4 * k * row,
        )  # fmt: skip
