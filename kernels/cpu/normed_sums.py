"""What attention and MLP of Gemma add to the hidden states: their output, normalised first.

    hidden = (hidden + rms_norm(output)) · scale

The scale is 1 but behind the layers of Gemma 4. Its inputs of layers (`kernels.reference.
layer_inputs`) are such sums, too, of as many rows a token as there are layers.

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
    float_outs,
    inverse_root_mean_square,
    load_pair,
    write_row,
)
from kernels.cpu.vector_ir import F32, I32, Builder, Value, broadcast, fma, i64


def _added(scale: Value, whole: Value) -> GroupValues:
    """Return the values (x · scale · weight + hidden) · whole; sources: x, weight, hidden.

    Product and sum are rounded together: a compiler that may join them does so on some sets only.
    """

    def values(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
        factor, of_all = broadcast(builder, scale), broadcast(builder, whole)
        x, weight, hidden = (load_pair(builder, source) for source in sources)
        first, second = (
            builder.fmul(fma(builder, builder.fmul(a, factor), w, h), of_all)
            for a, w, h in zip(x, weight, hidden, strict=True)
        )
        return first, second

    return values


@emitted(types.void, *[types.int64] * 7)
def add_normed_row(
    builder: Builder, source: Value, k: Value, weight: Value, epsilon: Value, base: Value,
    whole: Value, hidden: Value,
) -> None:  # fmt: skip
    """Write rms_norm of a row of k float32, added to the row `base` and multiplied by `whole`.

    `epsilon`, `whole`: the bits of a float32. `hidden`: what is written, may be `base`.
    """
    bits, factor = (builder.bitcast(builder.trunc(x, I32), F32) for x in (epsilon, whole))
    scale = inverse_root_mean_square(builder, source, k, bits)
    sources = [source, weight, base]
    write_row(
        builder, _added(scale, factor), sources, k, i64(RowFormat.FLOAT32), float_outs(hidden)
    )


@operation()
def add_normed_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add rms_norm of a piece's rows to its hidden rows."""
    k, parts = word(record, NormedSum.K), word(record, NormedSum.PARTS)
    num_rows = word(header, StepWord.NUM_TOKENS) * parts
    hidden = word(record, NormedSum.HIDDEN) + 4 * k * parts * word(header, StepWord.FIRST_TOKEN)
    first = word(header, word(record, NormedSum.SOURCE_FIRST_WORD))
    source = word(record, NormedSum.SOURCE) + 4 * k * parts * first
    base = word(record, NormedSum.BASE)
    for row in range(num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks):
        out = hidden + 4 * k * row
        add_normed_row(
            source + 4 * k * row, k, word(record, NormedSum.WEIGHT),
            word(record, NormedSum.EPSILON), base if base != 0 else out,
            word(record, NormedSum.SCALE), out,
        )  # fmt: skip
