"""Rows of float32 added to others, and the biases of products that way.

    add_bias        bias, added to every row of a piece that a product has written

A product with a bias writes or adds its sums as any other, and this comes behind it; biases of
queries, keys and values are added where heads are rotated (`rope_write`), those of experts where
their rows are gated (`row_inputs`) and added up (`routing`).
"""

from __future__ import annotations

import numpy as np
from numba import types

from kernels.cpu.compiled import operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.operands import BiasRecord
from kernels.cpu.operation import StepWord
from kernels.cpu.vector_ir import (
    F32,
    LANES,
    Builder,
    Value,
    broadcast,
    call,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    store,
)


@emitted(types.void, types.int64, types.float32, types.int64, types.int64)
def add_weighted(builder: Builder, given: Value, weight: Value, out: Value, n: Value) -> None:
    """Add weight · given to n float32 numbers, each rounded once."""
    weights = broadcast(builder, weight)

    def places(index: Value) -> list[Value]:
        return [offset(builder, at, builder.shl(index, i64(2))) for at in (given, out)]

    def some(index: Value) -> None:
        source, target = places(index)
        added = load(builder, target, weights.type)
        store(builder, fma(builder, load(builder, source, weights.type), weights, added), target)

    def one(index: Value) -> None:
        source, target = places(builder.add(index, whole))
        operands = [load(builder, source, F32), weight, load(builder, target, F32)]
        store(builder, call(builder, "llvm.fma.f32", F32, operands), target)

    whole = builder.and_(n, i64(-LANES))
    counted_loop(builder, whole, some, step=LANES)
    counted_loop(builder, builder.sub(n, whole), one)


@operation()
def add_bias(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Add a bias to a run of rows."""
    n, bias = word(record, BiasRecord.N), word(record, BiasRecord.BIAS)
    num_rows = word(header, StepWord.NUM_TOKENS)
    first = word(header, word(record, BiasRecord.OUT_FIRST_WORD))
    out = word(record, BiasRecord.OUT) + 4 * n * first
    for row in range(num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks):
        add_weighted(bias, np.float32(1.0), out + 4 * n * row, n)
