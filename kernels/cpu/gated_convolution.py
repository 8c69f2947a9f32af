"""Gated convolutions, all that stands between two products; `kernels.reference.gated_convolution`.

Work is cut by row and run of channels.
"""

from __future__ import annotations

from typing import Final

from numba import types

from kernels.cpu.compiled import inlined, operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.memory_words import clear_bytes, read_int32
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import Pair, load_pair
from kernels.cpu.state_convolution import CHANNELS, HALF_BYTES, emit_convolution
from kernels.cpu.state_operands import GatedConvolution, StateRow
from kernels.cpu.vector_ir import Builder, Value, offset, store

STATE_ROW_BYTES: Final = 4 * len(StateRow)


@emitted(types.void, *[types.int64] * 8)
def convolve_token(
    builder: Builder,
    row: Value,
    part_bytes: Value,
    state: Value,
    weights: Value,
    channel_bytes: Value,
    num_channels: Value,
    kernel_size: Value,
    out: Value,
) -> None:
    """Bring channels of a token through their state, and write what comes out.

    `row`: float32, the token's b of these channels; c lies `part_bytes` behind it, x as many behind
    that. The others: as of `emit_convolution`.
    """

    def gives(at: Value) -> Pair:
        let_in = load_pair(builder, offset(builder, row, at))
        x = load_pair(builder, offset(builder, row, at, part_bytes, part_bytes))
        return builder.fmul(let_in[0], x[0]), builder.fmul(let_in[1], x[1])

    def takes(at: Value, sums: Pair) -> None:
        let_out = load_pair(builder, offset(builder, row, at, part_bytes))
        for half, (gate, total) in enumerate(zip(let_out, sums, strict=True)):
            target = offset(builder, out, at, HALF_BYTES * half)
            store(builder, builder.fmul(gate, total), target)

    emit_convolution(
        builder, state, weights, channel_bytes, num_channels, kernel_size, gives, takes
    )


@inlined()
def go_on(record: int, row: int, part: int) -> None:
    """Bring a row's tokens through a run of channels. `row`: address of its words."""
    channels = word(record, GatedConvolution.CHANNELS)
    kernel_size = word(record, GatedConvolution.KERNEL_SIZE)
    stride = 4 * word(record, GatedConvolution.ROWS_STRIDE)
    first_channel = part * CHANNELS
    count = min(CHANNELS, channels - first_channel)
    at = 4 * first_channel
    state = word(record, GatedConvolution.STATES) + at
    state += word(record, GatedConvolution.STATE_BYTES) * read_int32(row, StateRow.STATE)
    if read_int32(row, StateRow.IS_NEW) != 0:
        for place in range(kernel_size - 1):
            clear_bytes(state + 4 * channels * place, 4 * count)
    first = read_int32(row, StateRow.TOKEN)
    for token in range(first, first + read_int32(row, StateRow.NUM_TOKENS)):
        convolve_token(
            word(record, GatedConvolution.ROWS) + token * stride + at, 4 * channels, state,
            word(record, GatedConvolution.WEIGHTS) + at, 4 * channels, count, kernel_size,
            word(record, GatedConvolution.OUT) + 4 * channels * token + at,
        )  # fmt: skip


@operation()
def gated_convolution(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Bring the tokens of rows through their states, a run of rows and channels."""
    num_parts = -(-word(record, GatedConvolution.CHANNELS) // CHANNELS)
    work = word(header, StepWord.NUM_STATE_ROWS) * num_parts
    for this in range(work * chunk // num_chunks, work * (chunk + 1) // num_chunks):
        row = word(header, StepWord.STATE_ROWS) + this // num_parts * STATE_ROW_BYTES
        go_on(record, row, this % num_parts)
