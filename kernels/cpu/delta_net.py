"""Gated DeltaNet, all that stands between its two products; `kernels.reference.delta_net`.

    delta_net       convolution, lengths, step sizes, the delta rule, and the norm of what comes out
    gate_attended   what attention gave · sigmoid(its gates), of layers with attention beside these

Work is cut by row and key head. All tokens of a row go through the memory of the key head's value
heads, SUB_BLOCK at a time: first their q, k and v are made in scratch memory, then each block of 32
columns has them all. What is kept in states, where, and what of it in scratch memory:
`kernels.cpu.delta_net_sizes`.
"""

from __future__ import annotations

from typing import Final

from numba import types

from kernels.cpu.compiled import inlined, operation, scratch, word
from kernels.cpu.delta_net_sizes import COLUMNS, SUB_BLOCK
from kernels.cpu.delta_rule import gated_norm, remember, shorten, step_sizes
from kernels.cpu.emitted import emitted
from kernels.cpu.memory_words import (
    clear_bytes,
    copy_bytes,
    read_float32,
    read_int32,
    write_float32,
)
from kernels.cpu.operands import AttentionGate, RowFormat
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import Pair, float_outs, load_pair, write_row
from kernels.cpu.short_convolution import convolve
from kernels.cpu.sigmoids import sigmoid
from kernels.cpu.state_operands import DeltaNet, StateRow
from kernels.cpu.vector_ir import Builder, Value, i64

STATE_ROW_BYTES: Final = 4 * len(StateRow)


@inlined()
def value_head_of(record: int, head: int, member: int) -> int:
    """Return the value head that is number `member` of a key head's."""
    num_heads: int = word(record, DeltaNet.NUM_KEY_HEADS)
    group: int = word(record, DeltaNet.NUM_VALUE_HEADS) // num_heads
    is_tiled: bool = word(record, DeltaNet.ARE_TILED) != 0
    return member * num_heads + head if is_tiled else head * group + member


@inlined()
def part_of_head(record: int, head: int, part: int) -> tuple[int, int, int]:
    """Return which channels a key head has of q, k and each of its value heads (part 0, 1, 2 …).

    The first of them among all channels and in the window, and how many.
    """
    num_heads, key_dim = word(record, DeltaNet.NUM_KEY_HEADS), word(record, DeltaNet.KEY_DIM)
    if part < 2:
        return (part * num_heads + head) * key_dim, part * key_dim, key_dim
    value_dim, member = word(record, DeltaNet.VALUE_DIM), part - 2
    first = 2 * num_heads * key_dim + value_head_of(record, head, member) * value_dim
    return first, 2 * key_dim + member * value_dim, value_dim


@inlined()
def fill_window(
    record: int, head: int, window: int, row_bytes: int, rows: int, stride: int, count: int
) -> None:
    """Copy a head's channels of rows, `stride` bytes apart, to the window, or zeros (rows 0)."""
    group = word(record, DeltaNet.NUM_VALUE_HEADS) // word(record, DeltaNet.NUM_KEY_HEADS)
    for part in range(2 + group):
        first, place, size = part_of_head(record, head, part)
        for row in range(count):
            target = window + row * row_bytes + 4 * place
            if rows == 0:
                clear_bytes(target, 4 * size)
            else:
                copy_bytes(rows + row * stride + 4 * first, target, 4 * size)


@inlined()
def keep_rows(
    record: int, head: int, window: int, row_bytes: int, rows: int, stride: int, count: int
) -> None:
    """Copy the window's first rows to where `fill_window` takes them from."""
    group = word(record, DeltaNet.NUM_VALUE_HEADS) // word(record, DeltaNet.NUM_KEY_HEADS)
    for part in range(2 + group):
        first, place, size = part_of_head(record, head, part)
        for row in range(count):
            source = window + row * row_bytes + 4 * place
            copy_bytes(source, rows + row * stride + 4 * first, 4 * size)


@inlined()
def make_heads(
    record: int, head: int, window: int, row_bytes: int, count: int, products: int
) -> None:
    """Make q, k and v of what stands in the window; `products`: k·q of each token."""
    key_dim, num_key_heads = word(record, DeltaNet.KEY_DIM), word(record, DeltaNet.NUM_KEY_HEADS)
    num_value_heads = word(record, DeltaNet.NUM_VALUE_HEADS)
    values = num_value_heads * word(record, DeltaNet.VALUE_DIM)
    weight_row_bytes = 4 * (2 * num_key_heads * key_dim + values)
    for part in range(2 + num_value_heads // num_key_heads):
        first, place, size = part_of_head(record, head, part)
        convolve(
            window + 4 * place, row_bytes, count, size,
            word(record, DeltaNet.CONVOLUTION) + 4 * first, weight_row_bytes,
            word(record, DeltaNet.KERNEL_SIZE),
        )  # fmt: skip
    for i in range(count):
        write_float32(products, i, shorten(window + i * row_bytes, key_dim))


@inlined()
def make_factors(record: int, value_head: int, token: int, count: int, factors: int) -> None:
    """Write β and α of a sub-block that begins with `token`."""
    num_heads = word(record, DeltaNet.NUM_VALUE_HEADS)
    gates = word(record, DeltaNet.GATES) + 8 * token * num_heads
    for i in range(count):
        place = 2 * i * num_heads + value_head
        write_float32(factors, i, read_float32(gates, place))
        write_float32(factors, SUB_BLOCK + i, read_float32(gates, place + num_heads))
    rate = read_float32(word(record, DeltaNet.RATES), value_head)
    time_bias = read_float32(word(record, DeltaNet.TIME_BIAS), value_head)
    step_sizes(factors, rate, time_bias, count)


@inlined()
def pass_tokens(
    record: int, head: int, token: int, count: int, window: int, row_bytes: int, memory: int
) -> None:
    """Bring a sub-block that begins with `token` through the memory of a key head's value heads.

    `window`: with the rows before the sub-block and its own. `memory`: of value head 0.
    """
    key_dim, value_dim = word(record, DeltaNet.KEY_DIM), word(record, DeltaNet.VALUE_DIM)
    num_key_heads = word(record, DeltaNet.NUM_KEY_HEADS)
    num_value_heads = word(record, DeltaNet.NUM_VALUE_HEADS)
    num_kept = word(record, DeltaNet.KERNEL_SIZE) - 1
    results = window + (num_kept + SUB_BLOCK) * row_bytes
    factors = results + 4 * SUB_BLOCK * value_dim
    stride, out_stride = 4 * word(record, DeltaNet.ROWS_STRIDE), 4 * num_value_heads * value_dim
    gates = word(record, DeltaNet.ROWS) + token * stride
    gates += 4 * (2 * num_key_heads * key_dim + num_value_heads * value_dim)
    out = word(record, DeltaNet.OUT) + token * out_stride
    make_heads(record, head, window, row_bytes, count, factors + 8 * SUB_BLOCK)
    for member in range(num_value_heads // num_key_heads):
        value_head = value_head_of(record, head, member)
        make_factors(record, value_head, token, count, factors)
        for column in range(0, value_dim, COLUMNS):
            remember(
                memory + 4 * key_dim * (value_head * value_dim + column), window,
                window + 4 * (2 * key_dim + member * value_dim + column), row_bytes, key_dim,
                count, factors, results + 4 * column, 4 * value_dim,
            )  # fmt: skip
        at = 4 * value_head * value_dim
        for i in range(count):
            gated_norm(
                results + 4 * i * value_dim, gates + i * stride + at, word(record, DeltaNet.NORM),
                word(record, DeltaNet.EPSILON), value_dim, out + i * out_stride + at,
            )  # fmt: skip


@inlined()
def go_on(record: int, row: int, head: int, window: int) -> None:
    """Bring a row's tokens through the memory of a key head's value heads.

    `row`: address of its words. `window`: that of scratch memory.
    """
    key_dim, value_dim = word(record, DeltaNet.KEY_DIM), word(record, DeltaNet.VALUE_DIM)
    num_key_heads = word(record, DeltaNet.NUM_KEY_HEADS)
    num_value_heads = word(record, DeltaNet.NUM_VALUE_HEADS)
    group = num_value_heads // num_key_heads
    num_kept = word(record, DeltaNet.KERNEL_SIZE) - 1
    kept_stride = 4 * (2 * num_key_heads * key_dim + num_value_heads * value_dim)
    row_bytes = 4 * (2 * key_dim + group * value_dim)
    kept = word(record, DeltaNet.STATES)
    kept += word(record, DeltaNet.STATE_BYTES) * read_int32(row, StateRow.STATE)
    memory = kept + num_kept * kept_stride
    before = kept
    if read_int32(row, StateRow.IS_NEW) != 0:
        before = 0
        for member in range(group):
            size = 4 * key_dim * value_dim
            clear_bytes(memory + value_head_of(record, head, member) * size, size)
    fill_window(record, head, window, row_bytes, before, kept_stride, num_kept)

    first = read_int32(row, StateRow.TOKEN)
    end = first + read_int32(row, StateRow.NUM_TOKENS)
    stride = 4 * word(record, DeltaNet.ROWS_STRIDE)
    for token in range(first, end, SUB_BLOCK):
        count = min(SUB_BLOCK, end - token)
        rows = word(record, DeltaNet.ROWS) + token * stride
        fill_window(record, head, window + num_kept * row_bytes, row_bytes, rows, stride, count)
        pass_tokens(record, head, token, count, window, row_bytes, memory)
        for i in range(num_kept):
            copy_bytes(window + (count + i) * row_bytes, window + i * row_bytes, row_bytes)
    keep_rows(record, head, window, row_bytes, kept, kept_stride, num_kept)


@operation()
def delta_net(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Bring the tokens of rows through their states, a run of rows and key heads."""
    num_heads = word(record, DeltaNet.NUM_KEY_HEADS)
    work = word(header, StepWord.NUM_STATE_ROWS) * num_heads
    for this in range(work * chunk // num_chunks, work * (chunk + 1) // num_chunks):
        row = word(header, StepWord.STATE_ROWS) + this // num_heads * STATE_ROW_BYTES
        go_on(record, row, this % num_heads, scratch(header, worker))


def _times_sigmoid(builder: Builder, sources: list[Value], _: RowFormat) -> Pair:
    """Return x · sigmoid(gate); sources: x, gate."""
    values, gates = (load_pair(builder, source) for source in sources)
    first, second = (
        builder.fmul(x, sigmoid(builder, gate)) for x, gate in zip(values, gates, strict=True)
    )
    return first, second


@emitted(types.void, *[types.int64] * 3)
def gate_row(builder: Builder, row: Value, gates: Value, n: Value) -> None:
    """Multiply a row of n float32 by the sigmoids of its gates."""
    write_row(builder, _times_sigmoid, [row, gates], n, i64(RowFormat.FLOAT32), float_outs(row))


@operation()
def gate_attended(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply what attention gave a run of tokens by the sigmoids of its gates."""
    n, stride = word(record, AttentionGate.N), word(record, AttentionGate.GATES_STRIDE)
    num_tokens = word(header, StepWord.NUM_TOKENS)
    for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
        row = word(record, AttentionGate.OUT) + 4 * n * token
        gate_row(row, word(record, AttentionGate.GATES) + 4 * stride * token, n)
