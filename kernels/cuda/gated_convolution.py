"""Gated convolutions, all that stands between two products of a layer of LFM2.

    v    = b · x
    out  = c · Σ_j weight[j] · v[j]      over the last K tokens, the last one itself; each channel

A thread takes one vector of channels of a token; what lies before a row's first token is in its
state, or zero where the row is new (`recurrent_states`). Only the first K − 1 tokens of a row see
its state, and one thread takes them all:

    row     │ 0 … K − 2 │ K − 1 │ K │ K + 1 │ …
    threads   one         one     …             of each vector; those of tokens 1 … K − 2 do nothing

It alone reads the state of its channels, so it may write the new one in the same launch: the last
K − 1 of v, of which a short row has some in its state. A decoding row is such a thread.

v is rounded once, to float32, wherever it comes from; a sum begins with the oldest token, fused. So
a token's bits are its own. Specification: `kernels.reference.gated_convolution`.

Weights, and which row a token is of, are read before the launch ahead has ended, and the states of
rows that begin here are asked for: they wait for nobody.

By count, not measured: with 2048 channels and K 3 a decoding token reads 12 KB of projections, 16
KB of its state and 24 KB of weights, which all rows of a step share, in 2 blocks.

The ladder:
  v1  this. b and x of a prompt's tokens are read K times, by neighbouring blocks, from the second
      cache.
  v2  several tokens a thread, which share K − 1 products and the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.recurrent_states import VECTOR, WIDTHS, find_row
from kernels.cuda.variant import (
    STORAGE_TYPES,
    DeviceFunction,
    Expectation,
    Local,
    Pointer,
    Scalar,
    require_between,
)

PARTS: Final = 3
"""Of a token's projections: b, c, x."""
READ_EARLY: Final = (3, 4, 5)
"""Of the arguments: weight, token_rows, rows."""
FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class GatedConvolutionVariant(VectorVariant):
    """The compile-time parameters: `dtype` of a step, `width` K of the convolution, 2 to 8.

    Raises UnsupportedVariantError.
    """

    width: int

    def __post_init__(self) -> None:
        VectorVariant.__post_init__(self)
        require_between("width", *WIDTHS, self.width)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"gated_convolution_{self.dtype}_w{self.width}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        states = ("int32*", "int32*", "float32*", "int64", "int64")
        return (self.element, self.element, "int64", "float32*", *states, "int32")

    @property
    def expectation(self) -> Expectation:
        """A thread keeps the weights and the last K of v, each for a vector of channels."""
        registers = 112 if self.width <= 4 else 184
        instructions = ("LDG.128", "STG.128")
        return Expectation(registers, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(self, num_tokens: int, num_channels: int) -> tuple[int, int, int]:
        """Return the launch grid; `num_channels` C must be a multiple of the vector's length."""
        return self.row_grid(num_tokens, "num_channels", num_channels)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_gated_convolution(self)


def variants(*, every: bool) -> list[GatedConvolutionVariant]:
    """Return every variant, or those of the models known to us and some others."""
    if every:
        widths = range(WIDTHS[0], WIDTHS[1] + 1)
        return [
            GatedConvolutionVariant(dtype, width) for dtype in STORAGE_TYPES for width in widths
        ]
    return [
        GatedConvolutionVariant("bfloat16", 3),
        GatedConvolutionVariant("float32", 3),
        GatedConvolutionVariant("float16", 8),
    ]


def make_gated_convolution(variant: GatedConvolutionVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    width, threads = variant.width, variant.threads
    length = VECTOR_LENGTHS[variant.dtype]
    pieces, before = length // VECTOR, width - 1
    num_pieces = width * pieces
    load_vector, store_vector = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]
    load_floats, store_floats = LOAD_FLOATS["float32"], STORE_FLOATS["float32"]
    load_product = _make_load_product(variant.dtype)

    def gated_convolution(
        out: Pointer,
        projections: Pointer,
        stride: Scalar,
        weight: Pointer,
        token_rows: Pointer,
        rows: Pointer,
        states: Pointer,
        state_stride: Scalar,
        layer_start: Scalar,
        channels: Scalar,
    ) -> None:
        """Make one vector of token blockIdx.x, or of the first tokens of its row and their state.

        `out`: [T, C]. `projections`: a token's b, c, x, tokens `stride` elements apart, a multiple
        of 16 bytes. `weight`: [K, C]. The others: as in `recurrent_states`; `channels`: C.
        """
        let_next_begin()
        token = int64(cuda.blockIdx.x)
        first_channel = int32(cuda.blockIdx.y * threads * length)
        channel = int32(first_channel + cuda.threadIdx.x * length)
        first, count, state, is_new = find_row(rows, int64(token_rows[token]))
        place = int32(token - first)  # in its row
        begins = place == 0
        is_here = place < count and (begins or place >= before)
        is_used = is_here and channel < channels
        kept = int64(state) * state_stride + layer_start
        weights = cuda.local.array((num_pieces, VECTOR), float32)
        if is_used:
            for tap in range(width):
                for i in range(pieces):
                    at = int64(tap) * channels + channel + VECTOR * i
                    load_floats(weights, tap * pieces + i, weight, at)
        if is_here and begins and not is_new and cuda.threadIdx.x < before:
            size = min(int32(threads * length), int32(channels - first_channel))
            at = kept + int64(cuda.threadIdx.x) * channels + first_channel
            fetch_ahead(states, at, uint32(FLOAT_BYTES * size))
        wait_for_previous()

        if is_used:
            taps = cuda.local.array((num_pieces, VECTOR), float32)
            values = cuda.local.array((PARTS, length), float32)
            num_tokens = int32(1)
            if begins:
                num_tokens = min(int32(count), int32(before))
            for tap in range(before):
                if not begins:
                    row = (token + (tap - before)) * stride + channel
                    load_product(taps, tap * pieces, values, projections, row, channels)
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
                load_product(taps, before * pieces, values, projections, row, channels)
                load_vector(values, 1, projections, row + channels)
                for n in range(length):
                    total = float32(0)
                    for tap in range(width):
                        i = tap * pieces + n // VECTOR
                        total = multiply_add(taps[i, n % VECTOR], weights[i, n % VECTOR], total)
                    values[1, n] = multiply_float32(values[1, n], total)
                store_vector(out, (token + which) * channels + channel, values, 1)
                for i in range(before * pieces):
                    for n in range(VECTOR):
                        taps[i, n] = taps[i + pieces, n]
                which += int32(1)
            if begins:
                for tap in range(before):
                    if count > before:
                        row = (token + count + (tap - before)) * stride + channel
                        load_product(taps, tap * pieces, values, projections, row, channels)
                    for i in range(pieces):
                        at = kept + int64(tap) * channels + channel + VECTOR * i
                        store_floats(states, at, taps, tap * pieces + i)

    return gated_convolution


def _make_load_product(dtype: str) -> DeviceFunction:
    """Return the device function that makes a vector of v, in the rows of `taps` from `i` on."""
    length, load_vector = VECTOR_LENGTHS[dtype], LOAD_FLOATS[dtype]

    @cuda.jit(device=True, inline="always")
    def load_product(
        taps: Local, i: Scalar, values: Local, projections: Pointer, row: Scalar, channels: Scalar
    ) -> None:
        """`row`: where the vector is in b; x lies 2·C behind that. `values`: rows 0 and 2 serve."""
        load_vector(values, 0, projections, row)
        load_vector(values, 2, projections, row + 2 * int64(channels))
        for n in range(length):
            product = multiply_float32(values[0, n], values[2, n])
            taps[i + n // VECTOR, n % VECTOR] = product

    return load_product
