"""Gated convolutions, all that stands between two products of a layer of LFM2.

    v    = b · x
    out  = c · Σ_j weight[j] · v[j]      over the last K tokens, the last one itself; each channel

A thread takes one vector of channels of a token, or of a row's first K − 1, and writes the states
that it reads (`state_convolution`).

v is rounded once, to float32, wherever it comes from. So a token's bits are its own. Specification:
`kernels.reference.gated_convolution`.

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

from numba import cuda, float32, int32, int64

from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_float32
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.recurrent_states import VECTOR, WIDTHS, find_row
from kernels.cuda.state_convolution import make_vector_convolution
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
    threads, before = variant.threads, variant.width - 1
    length = VECTOR_LENGTHS[variant.dtype]
    own = make_vector_convolution(
        variant.dtype, variant.width, _make_load_product(variant.dtype), _make_gate(variant.dtype)
    )
    weight_rows, load_weights = own.weight_rows, own.load_weights
    fetch_kept, convolve = own.fetch_kept, own.convolve

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
        weights = cuda.local.array((weight_rows, VECTOR), float32)
        if is_used:
            load_weights(weights, weight, weight, channel, channels)
        if is_here and begins and not is_new:
            span = int32(threads * length)
            fetch_kept(states, kept, first_channel, channels, span, cuda.threadIdx.x)
        wait_for_previous()

        if is_used:
            target = token * channels + channel
            convolve(
                out, target, projections, stride, weights, states, kept, token, count, begins,
                is_new, channel, channels,
            )  # fmt: skip

    return gated_convolution


def _make_load_product(dtype: str) -> DeviceFunction:
    """Return what makes a vector of v: b · x, of which x lies 2·C behind b."""
    length, load_vector = VECTOR_LENGTHS[dtype], LOAD_FLOATS[dtype]

    @cuda.jit(device=True, inline="always")
    def load_product(
        taps: Local, i: Scalar, projections: Pointer, row: Scalar, channels: Scalar
    ) -> None:
        values = cuda.local.array((2, length), float32)
        load_vector(values, 0, projections, row)
        load_vector(values, 1, projections, row + 2 * int64(channels))
        for n in range(length):
            product = multiply_float32(values[0, n], values[1, n])
            taps[i + n // VECTOR, n % VECTOR] = product

    return load_product


def _make_gate(dtype: str) -> DeviceFunction:
    """Return what writes sums · c, which lies C behind b."""
    length = VECTOR_LENGTHS[dtype]
    load_vector, store_vector = LOAD_FLOATS[dtype], STORE_FLOATS[dtype]

    @cuda.jit(device=True, inline="always")
    def gate(
        out: Pointer,
        target: Scalar,
        sums: Local,
        projections: Pointer,
        row: Scalar,
        channels: Scalar,
    ) -> None:
        gates = cuda.local.array((1, length), float32)
        load_vector(gates, 0, projections, row + channels)
        for n in range(length):
            gates[0, n] = multiply_float32(gates[0, n], sums[0, n])
        store_vector(out, target, gates, 0)

    return gate
