"""Convolutions over a token and the K − 1 before it, by a launch that writes the states it reads.

    sum  = bias + Σ_j weight[j] · v[j]     over the last K tokens, the last one itself; each channel

A thread takes one vector of channels of a token; what lies before a row's first token is in its
state, or zero where the row is new (`recurrent_states`). Only the first K − 1 tokens of a row see
its state, and one thread takes them all:

    row     │ 0 … K − 2 │ K − 1 │ K │ K + 1 │ …
    threads   one         one     …             of each vector; those of tokens 1 … K − 2 do nothing

It alone reads the state of its channels, so it may write the new one in the same launch: the last
K − 1 of v, of which a short row has some in its state. A decoding row is such a thread.

What v is of a token, and what becomes of a sum, is the kernel's affair. A sum begins with the bias,
or zero, then comes the oldest token, fused. So a token's bits are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.instructions.early_launch import fetch_ahead
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.recurrent_states import VECTOR
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class VectorConvolution:
    """Device functions. `weights`: a thread's, [`weight_rows`, 4].

    `load_weights(weights, weight, bias, channel, channels)`: those of a vector, from [K, C] and
    [C]. `fetch_kept(states, kept, channel, channels, span, thread)`: have the inputs of a block's
    channels fetched, `span` of them at most from `channel` on; `kept`: where the layer's part of
    the state begins. `convolve`: see there.
    """

    weight_rows: int
    load_weights: DeviceFunction
    fetch_kept: DeviceFunction
    convolve: DeviceFunction


def make_vector_convolution(
    dtype: str,
    width: int,
    load_input: DeviceFunction,
    finish: DeviceFunction,
    *,
    has_bias: bool = False,
) -> VectorConvolution:
    """Return what a thread does with its vector.

    `load_input(taps, i, projections, row, channels)`: make v, in the rows of `taps` from `i` on;
    `row`: where the vector's channels begin among a token's. `finish(out, target, sums,
    projections, row, channels)`: write what becomes of the sums, sums[0, :], to `out[target]`.
    """
    length = VECTOR_LENGTHS[dtype]
    pieces, before = length // VECTOR, width - 1
    num_pieces = width * pieces
    load_floats, store_floats = LOAD_FLOATS["float32"], STORE_FLOATS["float32"]

    @cuda.jit(device=True, inline="always")
    def load_weights(
        weights: Local, weight: Pointer, bias: Pointer, channel: Scalar, channels: Scalar
    ) -> None:
        for tap in range(width):
            for i in range(pieces):
                at = int64(tap) * channels + channel + VECTOR * i
                load_floats(weights, tap * pieces + i, weight, at)
        if has_bias:
            for i in range(pieces):
                load_floats(weights, num_pieces + i, bias, channel + VECTOR * i)

    @cuda.jit(device=True, inline="always")
    def fetch_kept(
        states: Pointer,
        kept: Scalar,
        channel: Scalar,
        channels: Scalar,
        span: Scalar,
        thread: Scalar,
    ) -> None:
        size = min(int32(span), int32(channels - channel))
        if thread < before and size > 0:
            at = kept + int64(thread) * channels + channel
            fetch_ahead(states, at, uint32(FLOAT_BYTES * size))

    @cuda.jit(device=True, inline="always")
    def convolve(
        out: Pointer,
        target: Scalar,
        projections: Pointer,
        stride: Scalar,
        weights: Local,
        states: Pointer,
        kept: Scalar,
        token: Scalar,
        count: Scalar,
        begins: Scalar,
        is_new: Scalar,
        channel: Scalar,
        channels: Scalar,
    ) -> None:
        """Make a vector of a token, or of the first tokens of its row and their state.

        `target`: where the token's goes; that of the next one is C behind it. `stride`: between
        tokens of `projections`. `count`: tokens of the row; `begins`: whether this one does.
        """
        taps = cuda.local.array((num_pieces, VECTOR), float32)
        sums = cuda.local.array((1, length), float32)
        num_tokens = int32(1)
        if begins:
            num_tokens = min(int32(count), int32(before))
        for tap in range(before):
            if not begins:
                row = (token + (tap - before)) * stride + channel
                load_input(taps, tap * pieces, projections, row, channels)
            elif is_new:
                for n in range(length):
                    taps[tap * pieces + n // VECTOR, n % VECTOR] = float32(0)
            else:
                for i in range(pieces):
                    at = kept + int64(tap) * channels + channel + VECTOR * i
                    load_floats(taps, tap * pieces + i, states, at)
        which = int32(0)
        while which < num_tokens:
            row = (token + which) * stride + channel
            load_input(taps, before * pieces, projections, row, channels)
            for n in range(length):
                total = float32(0)
                if has_bias:
                    total = weights[num_pieces + n // VECTOR, n % VECTOR]
                for tap in range(width):
                    i = tap * pieces + n // VECTOR
                    total = multiply_add(taps[i, n % VECTOR], weights[i, n % VECTOR], total)
                sums[0, n] = total
            finish(out, target + which * int64(channels), sums, projections, row, channels)
            for i in range(before * pieces):
                for n in range(VECTOR):
                    taps[i, n] = taps[i + pieces, n]
            which += int32(1)
        if begins:
            for tap in range(before):
                if count > before:
                    row = (token + count + (tap - before)) * stride + channel
                    load_input(taps, tap * pieces, projections, row, channels)
                for i in range(pieces):
                    at = kept + int64(tap) * channels + channel + VECTOR * i
                    store_floats(states, at, taps, tap * pieces + i)

    weight_rows = num_pieces + pieces * has_bias
    return VectorConvolution(weight_rows, load_weights, fetch_kept, convolve)
