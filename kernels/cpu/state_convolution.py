"""A convolution over a token and the few before it, which are in the state, as LLVM IR.

What a token gives goes into the state as soon as it is made, so a row's tokens are taken one after
the other: of a run of channels the state, the weights and a token's rows are in the first-level
cache. Each sum begins with the oldest token and is rounded once a term, so its bits are the same on
every instruction set and wherever a row begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from numba.core import cgutils

from kernels.cpu.row_values import Pair, load_pair
from kernels.cpu.vector_ir import (
    F32X,
    LANES,
    Builder,
    Value,
    constant,
    counted_loop,
    fma,
    i64,
    offset,
    store,
)

CHANNELS: Final = 256
"""That go through a state together."""
HALF_BYTES: Final = 4 * LANES

Gives: TypeAlias = Callable[[Value], Pair]
"""Emits what a token gives of 32 channels; the operand is their place in its row, in bytes."""
Takes: TypeAlias = Callable[[Value, Pair], None]
"""Emits what becomes of the sums of 32 channels, by the same place."""


def emit_convolution(
    builder: Builder,
    state: Value,
    weights: Value,
    channel_bytes: Value,
    num_channels: Value,
    kernel_size: Value,
    gives: Gives,
    takes: Takes,
) -> None:
    """Bring a run of channels of a token through their state.

    `state`: float32 [kernel_size − 1, C], `weights`: [kernel_size, C], both from the run's first
    channel on, rows `channel_bytes` apart. `num_channels`: of the run, a multiple of 32.
    """
    num_kept = builder.sub(kernel_size, i64(1))
    sums = [cgutils.alloca_once(builder, F32X) for _ in range(2)]

    def add(values: Pair, tap: Value) -> None:
        for total, a, b in zip(sums, values, load_pair(builder, tap), strict=True):
            builder.store(fma(builder, a, b, builder.load(total)), total)

    def channels(first: Value) -> None:
        at = builder.shl(first, i64(2))
        given = gives(at)
        kept, taps = offset(builder, state, at), offset(builder, weights, at)
        for total in sums:
            builder.store(constant(F32X, 0.0), total)

        def token_before(place: Value) -> None:
            by = builder.mul(place, channel_bytes)
            target = offset(builder, kept, by)
            values = load_pair(builder, target)
            add(values, offset(builder, taps, by))
            # It moves up; of the oldest nothing is kept.
            with builder.if_then(builder.icmp_signed(">", place, i64(0))):
                _store_pair(builder, values, builder.sub(target, channel_bytes))

        counted_loop(builder, num_kept, token_before)
        end = builder.mul(num_kept, channel_bytes)
        add(given, offset(builder, taps, end))
        takes(at, (builder.load(sums[0]), builder.load(sums[1])))
        _store_pair(builder, given, builder.sub(offset(builder, kept, end), channel_bytes))

    counted_loop(builder, num_channels, channels, step=2 * LANES)


def _store_pair(builder: Builder, values: Pair, address: Value) -> None:
    for half, value in enumerate(values):
        store(builder, value, offset(builder, address, HALF_BYTES * half))
