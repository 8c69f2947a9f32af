"""The rows that matrix products read, made of float32 rows and written in a product's format.

    normed_rows     rms_norm of hidden rows, in the order of the tokens
    grouped_rows    the same of groups of a row's elements, each for itself
    sampled_rows    rms_norm of the hidden rows whose logits are wanted (StepWord.OUT_TOKENS)
    gated_rows      silu(gate) · up, source rows gate | up of 2 · K elements
    gelu_rows       gelu(gate) · up, of the same
    gelu_rows_apart gelu(gate) · up, whose rows of gates and of ups lie apart
    relu2_rows      relu(x)², of rows without a gate
    clamped_rows    gpt-oss's gate of the rows of experts, biases of each row's expert added before
    plain_rows      the rows as they are: what attention wrote
    ordered_rows    the rows with their elements in another order: for matrices whose columns are

What is computed: `kernels.reference.rms_norm`, `kernels.reference.silu_mul`,
`kernels.reference.gelu_mul`, `kernels.reference.clamped_mul`, `kernels.reference.relu2`, within
rounding; how, and the formats: `kernels.cpu.row_values`. A chunk is a run of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray, types

from kernels.cpu.clamped_values import clamped_gated
from kernels.cpu.compiled import inlined, int64_at, operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.gelu_values import gelu_gated
from kernels.cpu.int8_packing import GROUP
from kernels.cpu.memory_words import read_int32
from kernels.cpu.operands import RowFormat, RowInput
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import (
    GroupValues,
    gated,
    inverse_root_mean_square,
    normalised,
    positive_squares,
    taken_from,
    unchanged,
    write_row,
)
from kernels.cpu.vector_ir import F32, I32, Builder, Value, i64, offset

RowMaker = Callable[..., None]


def _normed(builder: Builder, source: Value, *operands: Value) -> None:
    """Emit rms_norm of a row: void(source, k, weight, epsilon bits, format, out, beside …)."""
    k, weight, epsilon, row_format, *outs = operands
    bits = builder.bitcast(builder.trunc(epsilon, I32), F32)
    scale = inverse_root_mean_square(builder, source, k, bits)
    write_row(builder, normalised(scale), [source, weight], k, row_format, outs)


def _gated_by(values: GroupValues) -> RowMaker:
    """Return what emits a gated row; operands as above."""

    def emit(builder: Builder, source: Value, *operands: Value) -> None:
        k, _, _, row_format, *outs = operands
        up = offset(builder, source, builder.mul(k, i64(4)))
        write_row(builder, values, [source, up], k, row_format, outs)

    emit.__name__ = f"_{values.__name__}"
    return emit


def _gelu_apart(builder: Builder, source: Value, *operands: Value) -> None:
    """Emit a gated row; operands as above, with the row of ups as weight."""
    k, ups, _, row_format, *outs = operands
    write_row(builder, gelu_gated, [source, ups], k, row_format, outs)


def _clamped(builder: Builder, source: Value, *operands: Value) -> None:
    """Emit a gated row; operands as above, with the row of biases as weight."""
    k, biases, _, row_format, *outs = operands
    half = builder.mul(k, i64(4))
    sources = [source, offset(builder, source, half), biases, offset(builder, biases, half)]
    write_row(builder, clamped_gated, sources, k, row_format, outs)


def _relu2(builder: Builder, source: Value, *operands: Value) -> None:
    """Emit the squares of what is positive in a row; operands as above."""
    k, _, _, row_format, *outs = operands
    write_row(builder, positive_squares, [source], k, row_format, outs)


def _plain(builder: Builder, source: Value, *operands: Value) -> None:
    """Emit a row as it is; operands as above."""
    k, _, _, row_format, *outs = operands
    write_row(builder, unchanged, [source], k, row_format, outs)


def _ordered(builder: Builder, source: Value, *operands: Value) -> None:
    """Emit a row with its elements in another order; operands as above, but the order as weight."""
    k, order, _, row_format, *outs = operands
    write_row(builder, taken_from(source), [order], k, row_format, outs)


@inlined()
def expert_of(runs: int, row: int) -> int:
    """Return the expert whose run a row is of."""
    run = 0
    while row >= read_int32(runs, 2 + 3 * run) + read_int32(runs, 3 + 3 * run):
        run += 1
    expert: int = read_int32(runs, 1 + 3 * run)
    return expert


def _rows(
    emitter: RowMaker,
    *,
    is_gathered: bool = False,
    has_biases: bool = False,
    has_groups: bool = False,
    has_ups: bool = False,
) -> Any:  # noqa: ANN401 - Numba's objects
    """Return the kernel that makes rows with an emitter."""
    make_row = emitted(types.void, *[types.int64] * 11)(emitter)

    @inlined()
    def make_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
        source, stride = word(record, RowInput.SOURCE), word(record, RowInput.SOURCE_STRIDE)
        k, row_format = word(record, RowInput.K), word(record, RowInput.FORMAT)
        out, scales = word(record, RowInput.OUT), word(record, RowInput.OUT_SCALES)
        scaled_sums, sums = word(record, RowInput.OUT_SCALED_SUMS), word(record, RowInput.OUT_SUMS)
        pair_sums, begins = word(record, RowInput.OUT_PAIR_SUMS), word(record, RowInput.OUT_BEGINS)
        weight, epsilon = word(record, RowInput.WEIGHT), word(record, RowInput.EPSILON)
        num_rows = word(header, word(record, RowInput.ROWS_WORD))
        first = word(header, word(record, RowInput.SOURCE_FIRST_WORD))
        tokens = carray(int64_at(word(header, StepWord.OUT_TOKENS)), (num_rows,))
        element_bytes = 1
        if row_format == RowFormat.FLOAT32:
            element_bytes = 4
        elif row_format == RowFormat.BF16:
            element_bytes = 2
        for row in range(num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks):
            taken = tokens[row] if is_gathered else first + row
            down = 4 * row * (k // GROUP)
            own = weight
            if has_biases:
                own += 8 * k * expert_of(epsilon, row)
            if has_ups:
                token = word(header, StepWord.FIRST_TOKEN) + row
                own += 4 * token * word(record, RowInput.UPS_STRIDE)
            num_parts = 1
            if has_groups:
                num_parts = word(record, RowInput.NUM_GROUPS)
            size = k // num_parts
            for part in range(num_parts):
                at, beside = part * size, down + 4 * part * (size // GROUP)
                make_row(
                    source + 4 * (taken * stride + at), size, own + 4 * at, epsilon, row_format,
                    out + (row * k + at) * element_bytes, scales + beside, scaled_sums + beside,
                    sums + beside, begins + beside, pair_sums + beside,
                )  # fmt: skip

    return make_rows


_normed_rows = _rows(_normed)
_grouped_rows = _rows(_normed, has_groups=True)
_sampled_rows = _rows(_normed, is_gathered=True)
_gated_rows = _rows(_gated_by(gated))
_gelu_rows = _rows(_gated_by(gelu_gated))
_gelu_rows_apart = _rows(_gelu_apart, has_ups=True)
_relu2_rows = _rows(_relu2)
_clamped_rows = _rows(_clamped, has_biases=True)
_plain_rows = _rows(_plain)
_ordered_rows = _rows(_ordered)


@operation()
def normed_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write rms_norm of hidden rows."""
    _normed_rows(record, header, chunk, num_chunks, worker)


@operation()
def grouped_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write rms_norm of groups of rows' elements."""
    _grouped_rows(record, header, chunk, num_chunks, worker)


@operation()
def sampled_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write rms_norm of the hidden rows that OUT_TOKENS names."""
    _sampled_rows(record, header, chunk, num_chunks, worker)


@operation()
def gated_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write silu(gate) · up."""
    _gated_rows(record, header, chunk, num_chunks, worker)


@operation()
def gelu_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write gelu(gate) · up."""
    _gelu_rows(record, header, chunk, num_chunks, worker)


@operation()
def gelu_rows_apart(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write gelu(gate) · up, of rows that lie apart."""
    _gelu_rows_apart(record, header, chunk, num_chunks, worker)


@operation()
def relu2_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write relu(x)²."""
    _relu2_rows(record, header, chunk, num_chunks, worker)


@operation()
def clamped_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write what gates and ups of experts' rows give, clamped, with their biases."""
    _clamped_rows(record, header, chunk, num_chunks, worker)


@operation()
def plain_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write rows as they are."""
    _plain_rows(record, header, chunk, num_chunks, worker)


@operation()
def ordered_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Write rows with their elements in the order that ORDER says."""
    _ordered_rows(record, header, chunk, num_chunks, worker)
