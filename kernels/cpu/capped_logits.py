"""Logits that stay below a cap: c · tanh(x / c) of each (Gemma 2 and 4; `capped_values`).

What is not finite becomes NaN, so that it is noticed as without a cap. Specification:
`kernels.reference.capped_logits`. A chunk is a run of columns, of all rows.
"""

from __future__ import annotations

from numba import types

from kernels.cpu.capped_values import capped
from kernels.cpu.compiled import operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.int8_packing import GROUP
from kernels.cpu.operands import LogitsCap, RowFormat
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import GroupValues, Pair, float_outs, load_pair, write_row
from kernels.cpu.vector_ir import F32, I32, Builder, Value, i64


def _capped(cap: Value) -> GroupValues:
    """Return the values cap · tanh(x / cap), of what is finite; sources: x."""

    def values(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
        pair = load_pair(builder, sources[0])
        first, second = (
            builder.fadd(value, builder.fsub(x, x))
            for value, x in zip(capped(builder, cap, list(pair)), pair, strict=True)
        )
        return first, second

    return values


@emitted(types.void, *[types.int64] * 3)
def cap_row(builder: Builder, row: Value, n: Value, cap: Value) -> None:
    """Replace n float32 by cap · tanh of them / cap. `cap`: the bits of a float32."""
    bits = builder.bitcast(builder.trunc(cap, I32), F32)
    write_row(builder, _capped(bits), [row], n, i64(RowFormat.FLOAT32), float_outs(row))


@operation()
def cap_logits(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Cap a run of columns of all rows of logits."""
    vocab, cap = word(record, LogitsCap.VOCAB), word(record, LogitsCap.CAP)
    groups = (vocab + GROUP - 1) // GROUP
    first = groups * chunk // num_chunks * GROUP
    end = min(groups * (chunk + 1) // num_chunks * GROUP, vocab)
    for row in range(word(header, StepWord.NUM_OUT_ROWS)):
        cap_row(word(record, LogitsCap.LOGITS) + 4 * (row * vocab + first), end - first, cap)
