"""Mamba-2, what stands between its projection and the norm behind it; `kernels.reference.mamba2`.

    mamba2_inputs   the convolution, in place, by row and run of channels
    mamba2_scan     time steps, the scan and the gate, by row and head

The norm is that of the rows that the next product reads. Several heads read the same b and c, so
these are made before any head goes on. What is kept in states, and where:
`kernels.cpu.mamba2_sizes`.
"""

from __future__ import annotations

from typing import Final

from numba import types

from kernels.cpu.compiled import inlined, operation, scratch, word
from kernels.cpu.emitted import emitted
from kernels.cpu.mamba2_sizes import COLUMNS, SUB_BLOCK
from kernels.cpu.memory_words import clear_bytes, read_float32, read_int32, write_float32
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import Pair, load_pair, silu
from kernels.cpu.selective_scan import finish, finish_last, scan, scan_last, time_steps
from kernels.cpu.state_convolution import CHANNELS, HALF_BYTES, emit_convolution
from kernels.cpu.state_operands import Mamba2, StateRow
from kernels.cpu.vector_ir import Builder, Value, offset, store

STATE_ROW_BYTES: Final = 4 * len(StateRow)


@emitted(types.void, *[types.int64] * 7)
def convolve_token(
    builder: Builder,
    row: Value,
    state: Value,
    weights: Value,
    bias: Value,
    channel_bytes: Value,
    num_channels: Value,
    kernel_size: Value,
) -> None:
    """Replace channels of a token, float32, by silu(their sums + bias).

    The others: as of `emit_convolution`.
    """

    def gives(at: Value) -> Pair:
        return load_pair(builder, offset(builder, row, at))

    def takes(at: Value, sums: Pair) -> None:
        added = load_pair(builder, offset(builder, bias, at))
        for half, (total, more) in enumerate(zip(sums, added, strict=True)):
            value = silu(builder, builder.fadd(total, more))
            store(builder, value, offset(builder, row, at, HALF_BYTES * half))

    emit_convolution(
        builder, state, weights, channel_bytes, num_channels, kernel_size, gives, takes
    )


@inlined()
def num_channels(record: int) -> int:
    """Return C."""
    inner: int = word(record, Mamba2.NUM_HEADS) * word(record, Mamba2.HEAD_DIM)
    size: int = word(record, Mamba2.STATE_SIZE) * word(record, Mamba2.NUM_GROUPS)
    return inner + 2 * size


@inlined()
def state_of(record: int, row: int) -> int:
    """Return the address of this layer's part of a row's state."""
    address: int = word(record, Mamba2.STATES)
    address += word(record, Mamba2.STATE_BYTES) * read_int32(row, StateRow.STATE)
    return address


@inlined()
def convolve_part(record: int, row: int, part: int) -> None:
    """Bring a row's tokens through a run of channels. `row`: address of its words."""
    channels, kernel_size = num_channels(record), word(record, Mamba2.KERNEL_SIZE)
    stride = 4 * word(record, Mamba2.ROWS_STRIDE)
    count = min(CHANNELS, channels - part * CHANNELS)
    at = 4 * part * CHANNELS
    state = state_of(record, row) + at
    if read_int32(row, StateRow.IS_NEW) != 0:
        for place in range(kernel_size - 1):
            clear_bytes(state + 4 * channels * place, 4 * count)
    first = read_int32(row, StateRow.TOKEN)
    for token in range(first, first + read_int32(row, StateRow.NUM_TOKENS)):
        convolve_token(
            word(record, Mamba2.ROWS) + token * stride + at, state,
            word(record, Mamba2.CONVOLUTION) + at, word(record, Mamba2.BIAS) + at,
            4 * channels, count, kernel_size,
        )  # fmt: skip


@operation()
def mamba2_inputs(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Convolve the tokens of rows, a run of rows and channels."""
    num_parts = -(-num_channels(record) // CHANNELS)
    work = word(header, StepWord.NUM_STATE_ROWS) * num_parts
    for this in range(work * chunk // num_chunks, work * (chunk + 1) // num_chunks):
        row = word(header, StepWord.STATE_ROWS) + this // num_parts * STATE_ROW_BYTES
        convolve_part(record, row, this % num_parts)


@inlined()
def go_on(record: int, row: int, head: int, factors: int) -> None:
    """Bring a row's tokens through a head's memory.

    `row`: address of its words. `factors`: that of scratch memory.
    """
    num_heads, head_dim = word(record, Mamba2.NUM_HEADS), word(record, Mamba2.HEAD_DIM)
    size, inner = word(record, Mamba2.STATE_SIZE), num_heads * head_dim
    channels, num_groups = num_channels(record), word(record, Mamba2.NUM_GROUPS)
    of_group = 4 * (inner + size * (head // (num_heads // num_groups)))
    steps = factors + 8 * SUB_BLOCK
    sums = steps + 4 * SUB_BLOCK * COLUMNS
    memory = state_of(record, row) + 4 * (word(record, Mamba2.KERNEL_SIZE) - 1) * channels
    memory += 4 * size * head_dim * head
    if read_int32(row, StateRow.IS_NEW) != 0:
        clear_bytes(memory, 4 * size * head_dim)
    stride = 4 * word(record, Mamba2.ROWS_STRIDE)
    rate = read_float32(word(record, Mamba2.RATES), head)
    time_bias = read_float32(word(record, Mamba2.TIME_BIAS), head)
    skip = read_float32(word(record, Mamba2.SKIPS), head)
    first = read_int32(row, StateRow.TOKEN)
    end = first + read_int32(row, StateRow.NUM_TOKENS)
    for token in range(first, end, SUB_BLOCK):
        count = min(SUB_BLOCK, end - token)
        rows = word(record, Mamba2.ROWS) + token * stride
        for i in range(count):
            place = (token + i) * num_heads + head
            write_float32(factors, i, read_float32(word(record, Mamba2.STEPS), place))
        time_steps(factors, rate, time_bias, count)
        last = head_dim % COLUMNS  # columns of a last block of fewer
        for column in range(0, head_dim - last, COLUMNS):
            at = 4 * (head * head_dim + column)
            scan(
                memory + 4 * size * column, rows + at, rows + of_group, 4 * size * num_groups,
                stride, size, count, factors, steps, sums,
            )  # fmt: skip
            finish(
                sums, rows + at, rows + 4 * channels + at, stride,
                word(record, Mamba2.OUT) + 4 * inner * token + at, 4 * inner, skip, count,
            )  # fmt: skip
        if last != 0:
            at = 4 * (head * head_dim + head_dim - last)
            scan_last(
                memory + 4 * size * (head_dim - last), rows + at, rows + of_group,
                4 * size * num_groups, stride, size, count, factors, steps, sums,
            )  # fmt: skip
            finish_last(
                sums, rows + at, rows + 4 * channels + at, stride,
                word(record, Mamba2.OUT) + 4 * inner * token + at, 4 * inner, skip, count,
            )  # fmt: skip


@operation()
def mamba2_scan(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Bring the tokens of rows through their states, a run of rows and heads."""
    num_heads = word(record, Mamba2.NUM_HEADS)
    work = word(header, StepWord.NUM_STATE_ROWS) * num_heads
    for this in range(work * chunk // num_chunks, work * (chunk + 1) // num_chunks):
        row = word(header, StepWord.STATE_ROWS) + this // num_heads * STATE_ROW_BYTES
        go_on(record, row, this % num_heads, scratch(header, worker))
