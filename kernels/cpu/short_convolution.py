"""The convolution of Gated DeltaNet over a token and those before it, each channel alone, as IR.

Each sum begins with the oldest token and is rounded once a term, so its bits are the same on every
instruction set and wherever a row begins.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils

from kernels.cpu.emitted import emitted
from kernels.cpu.row_values import load_pair, silu
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


@emitted(types.void, *[types.int64] * 7)
def convolve(
    builder: Builder,
    window: Value,
    row_bytes: Value,
    num_tokens: Value,
    num_channels: Value,
    weights: Value,
    weight_row_bytes: Value,
    kernel_size: Value,
) -> None:
    """Replace row t of a window by silu(Σ rows t + j · weights row j), for each token t in turn.

    `window`: float32, a row each for the kernel_size − 1 tokens before and for the tokens; nobody
    behind token t reads row t. `num_channels`: a multiple of 32.
    """
    sums = [cgutils.alloca_once(builder, F32X) for _ in range(2)]

    def token(index: Value) -> None:
        row = offset(builder, window, builder.mul(index, row_bytes))

        def channels(first: Value) -> None:
            at = builder.shl(first, i64(2))
            target = offset(builder, row, at)
            for total in sums:
                builder.store(constant(F32X, 0.0), total)

            def tap(place: Value) -> None:
                x = load_pair(builder, offset(builder, target, builder.mul(place, row_bytes)))
                row_of_weights = builder.mul(place, weight_row_bytes)
                weight = load_pair(builder, offset(builder, weights, at, row_of_weights))
                for total, a, b in zip(sums, x, weight, strict=True):
                    builder.store(fma(builder, a, b, builder.load(total)), total)

            counted_loop(builder, kernel_size, tap)
            for half, total in enumerate(sums):
                value = silu(builder, builder.load(total))
                store(builder, value, offset(builder, target, 4 * LANES * half))

        counted_loop(builder, num_channels, channels, step=2 * LANES)

    counted_loop(builder, num_tokens, token)
