"""Norms of all query heads of a token together, and of all its key heads (OLMo 2).

In place, ahead of the rotation; `kernels.reference.rope.normed_together`.
"""

from __future__ import annotations

from numba import types

from kernels.cpu.compiled import inlined, operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.operands import JointNorms, RowFormat
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import float_outs, inverse_root_mean_square, normalised, write_row
from kernels.cpu.vector_ir import F32, I32, Builder, Value, i64


@emitted(types.void, *[types.int64] * 4)
def normalise_row(builder: Builder, row: Value, weight: Value, n: Value, epsilon: Value) -> None:
    """Replace n float32 by rms_norm of them. `epsilon`: the bits of a float32."""
    bits = builder.bitcast(builder.trunc(epsilon, I32), F32)
    scale = inverse_root_mean_square(builder, row, n, bits)
    write_row(builder, normalised(scale), [row, weight], n, i64(RowFormat.FLOAT32), float_outs(row))


@inlined()
def normalise_token(record: int, token: int) -> None:
    """Normalise a token's queries and its keys."""
    queries, keys = word(record, JointNorms.QUERY_SIZE), word(record, JointNorms.KEY_SIZE)
    row = word(record, JointNorms.QKV) + 4 * token * (queries + 2 * keys)
    epsilon = word(record, JointNorms.EPSILON)
    normalise_row(row, word(record, JointNorms.QUERY_NORM), queries, epsilon)
    normalise_row(row + 4 * queries, word(record, JointNorms.KEY_NORM), keys, epsilon)


@operation()
def joint_norms(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Normalise queries and keys of a run of tokens."""
    num_tokens = word(header, StepWord.NUM_TOKENS)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        normalise_token(record, token)
