"""What a Gated DeltaNet layer makes of a token before it goes through the state (`delta_rule`).

    q, k, v = silu(Σ_j weight[j] · x[j])     over the last K tokens, the last one itself; each
    q, k    = q / |q| / √Dk,  k / |k|        channel alone; lengths are those of key heads
    β, α    = sigmoid(b),  e^(rate · softplus(a + bias))          of each value head (`step_sizes`)

What lies before a row's first token is in its state, or zero where the row is new; both are drawn
in `recurrent_states`. A warp takes one head of one token, or β and α of 32 value heads:

    token t    │ q head 0 … │ k head 0 … │ v head 0 … │ β, α of heads 0 … 31 │ …
    warp         0            Hk           2·Hk         2·Hk + Hv

and a lane has a few neighbours of a head (`head_lanes`), so that a length is a sum over the warp.
Outputs are float32 whatever x is: the state is, and a prompt's tokens would be rounded once more.

Weights and what a row's first token reads of its state are asked for before the launch ahead has
ended, rates and biases are read: the other layers' weights have driven them out of the second
cache, and they wait for nobody.

A token's bits are its own: channels are summed in the order of tokens, fused, whether those come
from the state or from the step. Specification: `kernels.reference.delta_net`.

By count, not measured: with 16 key heads and 32 value heads of 128 and K 4 a decoding token reads
128 KB of weights, which all rows of a step share, and 96 KB of its state, in 17 blocks.

The ladder:
  v1  this. A prompt's rows are read K times, by neighbouring blocks, from the second cache.
  v2  several tokens a warp, which share K − 1 rows and the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.activation import silu
from kernels.cuda.head_lanes import HeadLanes, make_load_run, make_store_run
from kernels.cuda.instructions.conversions import CONVERSIONS, reciprocal_root
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_add, multiply_float32
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.recurrent_states import find_row, require_head_sizes
from kernels.cuda.step_sizes import decay, sigmoid
from kernels.cuda.variant import (
    STORAGE_TYPES,
    DeviceFunction,
    Expectation,
    Local,
    Pointer,
    Scalar,
    require_one_of,
)
from kernels.reference.delta_net import LENGTH_EPSILON

WARPS: Final = 4
"""Of a block."""
READ_EARLY: Final = (7, 8, 9, 10)
"""Of the arguments: rates, time_bias, token_rows, rows; the former are weights."""
FLOAT_BYTES: Final = 4
EPSILON = float32(LENGTH_EPSILON)


@dataclass(frozen=True, slots=True)
class ShortConvolutionVariant:
    """The compile-time parameters: `dtype` of a step, elements of a head, the convolution's width.

    `key_size` Dk and `value_size` Dv: multiples of 32 up to 256. `width` K: 2 to 8. Raises
    UnsupportedVariantError.
    """

    dtype: str
    key_size: int
    value_size: int
    width: int

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_head_sizes(self.key_size, self.value_size, self.width)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        sizes = f"k{self.key_size}_v{self.value_size}_w{self.width}"
        return f"short_convolution_{self.dtype}_{sizes}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        projected = (element, "int64", "float32*", element, "int64", "float32*", "float32*")
        states = ("int32*", "int32*", "float32*", "int64", "int64")
        return ("float32*", "float32*", *projected, *states, "int32", "int32")

    @property
    def expectation(self) -> Expectation:
        """A lane has the inputs of all taps under way at once, and as many weights."""
        registers = 64 if self.width <= 4 else 128
        instructions = ("LDG", "STG", "SHFL", "MUFU")
        return Expectation(registers, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(
        self, num_tokens: int, num_key_heads: int, num_value_heads: int
    ) -> tuple[int, int, int]:
        """Return the launch grid."""
        warps = 2 * num_key_heads + num_value_heads + -(-num_value_heads // 32)
        return (num_tokens, -(-warps // WARPS), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_short_convolution(self)


def variants(*, every: bool) -> list[ShortConvolutionVariant]:
    """Return a spread of the variants, or those of the models known to us and some others."""
    if every:
        shapes = ((128, 128, 4), (64, 64, 4), (96, 160, 2), (192, 32, 8), (256, 256, 4))
        return [
            ShortConvolutionVariant(dtype, *shape) for dtype in STORAGE_TYPES for shape in shapes
        ]
    return [
        ShortConvolutionVariant("bfloat16", 128, 128, 4),
        ShortConvolutionVariant("float32", 128, 128, 4),
        ShortConvolutionVariant("float16", 96, 64, 3),
    ]


def make_short_convolution(variant: ShortConvolutionVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    width, key_size, value_size = variant.width, variant.key_size, variant.value_size
    convolve_key = _make_convolve(variant.dtype, key_size, width, is_key=True)
    convolve_value = _make_convolve(variant.dtype, value_size, width, is_key=False)
    to_float32, _ = CONVERSIONS[variant.dtype]
    query_scale, key_scale = float32(1 / math.sqrt(key_size)), float32(1)
    key_bytes, value_bytes = FLOAT_BYTES * key_size, FLOAT_BYTES * value_size

    def short_convolution(
        convolved: Pointer,
        step_sizes: Pointer,
        projections: Pointer,
        stride: Scalar,
        weight: Pointer,
        gates: Pointer,
        gates_stride: Scalar,
        rates: Pointer,
        time_bias: Pointer,
        token_rows: Pointer,
        rows: Pointer,
        states: Pointer,
        state_stride: Scalar,
        layer_start: Scalar,
        num_key_heads: Scalar,
        num_value_heads: Scalar,
    ) -> None:
        """Make one head of token blockIdx.x, or 32 value heads' β and α.

        `convolved`: [T, C]. `step_sizes`: [T, 2·Hv], a token's β, then α. `projections`: its q, k,
        v, tokens `stride` elements apart, a multiple of 16 bytes; what is behind them is not read.
        `weight`: [K, C]. `gates`: its b, then a, tokens `gates_stride` apart. `rates`, `time_bias`:
        [Hv]. The others: as in `recurrent_states`.
        """
        let_next_begin()
        lane, warp = lane_and_warp()
        token = int64(cuda.blockIdx.x)
        head = int32(cuda.blockIdx.y * WARPS + warp)
        first, count, state, is_new = find_row(rows, int64(token_rows[token]))
        place = int32(token - first)  # in its row
        is_used = place >= 0 and place < count
        num_heads = int32(2 * num_key_heads + num_value_heads)
        channels = 2 * num_key_heads * int64(key_size) + num_value_heads * int64(value_size)
        inputs = int64(state) * state_stride + layer_start
        is_of_key = head < 2 * num_key_heads
        channel = int64(head) * key_size
        if not is_of_key:
            channel += (int64(head) - 2 * num_key_heads) * (value_size - key_size)
        if is_used and place == 0 and head < num_heads:
            size = uint32(key_bytes if is_of_key else value_bytes)
            if lane < width:
                fetch_ahead(weight, lane * channels + channel, size)
            elif lane < 2 * width - 1 and not is_new:
                fetch_ahead(states, inputs + (lane - width) * channels + channel, size)
        value_head = int32((head - num_heads) * 32 + lane)
        has_gates = is_used and value_head >= 0 and value_head < num_value_heads
        rate, bias = float32(0), float32(0)
        if has_gates:
            rate, bias = rates[value_head], time_bias[value_head]
        wait_for_previous()

        if is_used:
            row = token * stride + channel
            if is_of_key:
                scale = query_scale if head < num_key_heads else key_scale
                convolve_key(
                    convolved, projections, row, stride, weight, states, inputs, channel, channels,
                    token, place, is_new, lane, scale,
                )  # fmt: skip
            elif head < num_heads:
                convolve_value(
                    convolved, projections, row, stride, weight, states, inputs, channel, channels,
                    token, place, is_new, lane, key_scale,
                )  # fmt: skip
            elif has_gates:
                gate = token * gates_stride + value_head
                time = add_float32(to_float32(gates[gate + num_value_heads]), bias)
                target = token * 2 * num_value_heads + value_head
                step_sizes[target] = sigmoid(to_float32(gates[gate]))
                step_sizes[target + num_value_heads] = decay(time, rate)

    return short_convolution


def _make_convolve(dtype: str, size: int, width: int, *, is_key: bool) -> DeviceFunction:
    """Return the device function for a head of `size` elements; a key's gets length 1."""
    lanes = HeadLanes(size)
    length, runs = lanes.length, lanes.runs
    load_input, load_float = make_load_run(dtype, length), make_load_run("float32", length)
    store_float = make_store_run("float32", length)
    before = width - 1

    @cuda.jit(device=True, inline="always")
    def load_tap(
        values: Local,
        tap: Scalar,
        projections: Pointer,
        element: Scalar,
        stride: Scalar,
        states: Pointer,
        kept: Scalar,
        channels: Scalar,
        place: Scalar,
        is_new: Scalar,
    ) -> None:
        """values[tap] = the run of the token so many before, from the step or the state."""
        source = place + (tap - before)  # in the row
        if source >= 0:
            load_input(values, tap, projections, element + (tap - before) * stride)
        elif is_new:
            for n in range(length):
                values[tap, n] = float32(0)
        else:
            load_float(values, tap, states, kept + (source + before) * channels)

    @cuda.jit(device=True, inline="always")
    def convolve(
        convolved: Pointer,
        projections: Pointer,
        row: Scalar,
        stride: Scalar,
        weight: Pointer,
        states: Pointer,
        inputs: Scalar,
        channel: Scalar,
        channels: Scalar,
        token: Scalar,
        place: Scalar,
        is_new: Scalar,
        lane: Scalar,
        scale: Scalar,
    ) -> None:
        """Write a head of a token, for a warp. `row`: where its channels begin in `projections`."""
        sums = cuda.local.array((runs, length), float32)
        values = cuda.local.array((width, length), float32)
        weights = cuda.local.array((width, length), float32)
        for i in range(runs):
            at = (32 * i + lane) * length
            kept = inputs + channel + at
            for tap in range(width):
                load_float(weights, tap, weight, tap * channels + channel + at)
                load_tap(
                    values, tap, projections, row + at, stride, states, kept, channels, place,
                    is_new,
                )  # fmt: skip
            for n in range(length):
                total = float32(0)
                for tap in range(width):
                    total = multiply_add(values[tap, n], weights[tap, n], total)
                sums[i, n] = silu(total)
        if is_key:
            squares = float32(0)
            for i in range(runs):
                for n in range(length):
                    squares = multiply_add(sums[i, n], sums[i, n], squares)
            shrink = reciprocal_root(add_float32(warp_sum(squares), EPSILON))
            for i in range(runs):
                for n in range(length):
                    normed = multiply_float32(sums[i, n], shrink)
                    sums[i, n] = multiply_float32(normed, scale)
        for i in range(runs):
            target = token * channels + channel + (32 * i + lane) * length
            store_float(convolved, target, sums, i)

    return convolve
