"""What a Mamba-2 layer makes of a token before it goes through the memory (`selective_scan`).

    x, b, c  = silu(bias + Σ_j weight[j] · v[j])     over the last K tokens, the last one itself;
                                                     v: x, b, c of the projections, each channel
    Δ, α     = softplus(d + time_bias),  e^(rate · Δ)              of each head (`step_sizes`)

b and c of a token are those of all groups of heads, one behind the other.

A thread takes one vector of a token: of its channels, or, behind those, of its heads' d:

    token t    │ x, b, c: C channels │ d: H heads │
    thread       0 …                  …            one for each 16 bytes of the projections

The threads of channels write the states that they read: one has a row's first K − 1 tokens
(`state_convolution`). Outputs are float32 whatever the projections are, and lie as what
`delta_rule_stages` copies: c is there what q is in Gated DeltaNet, b what k is, x what v is.

Weights, biases and rates, and which row a token is of, are read before the launch ahead has ended,
and the states of rows that begin here are asked for: they wait for nobody.

A token's bits are its own. Specification: `kernels.reference.mamba2`.

By count, not measured: with 64 heads of 64, N 128 and K 4 a decoding token reads 9 KB of
projections and 52 KB of its state, writes as much of that and 18 KB for the scan, and reads 87 KB
of weights, which all rows of a step share, in 5 blocks.

The ladder:
  v1  this. A prompt's projections are read K times, by neighbouring blocks, from the second cache.
  v2  several tokens a thread, which share K − 1 of them and the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64

from kernels.cuda.activation import silu
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_float32
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.recurrent_states import HEAD_SIZE_STEP, VECTOR, WIDTHS, find_row
from kernels.cuda.state_convolution import make_vector_convolution
from kernels.cuda.step_sizes import exp_below_one, softplus
from kernels.cuda.variant import (
    STORAGE_TYPES,
    DeviceFunction,
    Expectation,
    Local,
    Pointer,
    Scalar,
    require_between,
    require_multiple,
)

READ_EARLY: Final = (4, 5, 6, 7, 8, 9)
"""Of the arguments: weight, bias, rates, time_bias, token_rows, rows."""


@dataclass(frozen=True, slots=True)
class Mamba2InputsVariant(VectorVariant):
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
        return f"mamba2_inputs_{self.dtype}_w{self.width}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        weights = ("float32*",) * 4
        states = ("int32*", "int32*", "float32*", "int64", "int64")
        return ("float32*", "float32*", self.element, "int64", *weights, *states, *["int32"] * 3)

    @property
    def expectation(self) -> Expectation:
        """A thread keeps the weights and the last K of v, each for a vector of channels."""
        registers = 128 if self.width <= 4 else 200
        instructions = ("LDG.128", "STG.128", "MUFU")
        return Expectation(registers, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(
        self, num_tokens: int, num_heads: int, head_dim: int, key_size: int
    ) -> tuple[int, int, int]:
        """Return the launch grid; `num_heads` H must be a multiple of the vector's length.

        `key_size`: of all groups.
        """
        require_multiple("num_heads", VECTOR_LENGTHS[self.dtype], num_heads)
        require_multiple("inner_size", HEAD_SIZE_STEP, num_heads * head_dim)
        require_multiple("key_size", HEAD_SIZE_STEP, key_size)
        channels = num_heads * head_dim + 2 * key_size
        return self.row_grid(num_tokens, "channels", channels + num_heads)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_mamba2_inputs(self)


def variants(*, every: bool) -> list[Mamba2InputsVariant]:
    """Return every variant, or those of the models known to us and some others."""
    if every:
        widths = range(WIDTHS[0], WIDTHS[1] + 1)
        return [Mamba2InputsVariant(dtype, width) for dtype in STORAGE_TYPES for width in widths]
    return [
        Mamba2InputsVariant("bfloat16", 4),
        Mamba2InputsVariant("float32", 4),
        Mamba2InputsVariant("float16", 8),
    ]


def make_mamba2_inputs(variant: Mamba2InputsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, before = variant.threads, variant.width - 1
    length = VECTOR_LENGTHS[variant.dtype]
    pieces = length // VECTOR
    found_rows = 2 * pieces  # Δ, then α
    load_vector = LOAD_FLOATS[variant.dtype]
    load_floats, store_floats = LOAD_FLOATS["float32"], STORE_FLOATS["float32"]
    own = make_vector_convolution(
        variant.dtype, variant.width, _make_load_plain(variant.dtype), _make_activate(length),
        has_bias=True,
    )  # fmt: skip
    weight_rows, load_weights = own.weight_rows, own.load_weights
    fetch_kept, convolve = own.fetch_kept, own.convolve

    def mamba2_inputs(
        convolved: Pointer,
        step_sizes: Pointer,
        projections: Pointer,
        stride: Scalar,
        weight: Pointer,
        bias: Pointer,
        rates: Pointer,
        time_bias: Pointer,
        token_rows: Pointer,
        rows: Pointer,
        states: Pointer,
        state_stride: Scalar,
        layer_start: Scalar,
        num_heads: Scalar,
        inner_size: Scalar,
        key_size: Scalar,
    ) -> None:
        """Make one vector of token blockIdx.x, or of the first tokens of its row and their state.

        `convolved`: [T, C], a token's c, b, x. `step_sizes`: [T, 2·H], its Δ, then α.
        `projections`: its x, b, c, z, d, tokens `stride` elements apart, a multiple of 16 bytes.
        `weight`: [K, C]; `bias`: [C]; `rates`, `time_bias`: [H]. `inner_size`: H·P;
        `key_size`: elements of b, of all groups. The others: as in `recurrent_states`.
        """
        let_next_begin()
        token = int64(cuda.blockIdx.x)
        channels = int32(inner_size + 2 * key_size)
        first_channel = int32(cuda.blockIdx.y * threads * length)
        channel = int32(first_channel + cuda.threadIdx.x * length)
        head = int32(channel - channels)
        first, count, state, is_new = find_row(rows, int64(token_rows[token]))
        place = int32(token - first)  # in its row
        begins = place == 0
        is_used = place >= 0 and place < count
        is_convolved = is_used and (begins or place >= before) and channel < channels
        has_steps = is_used and head >= 0 and head < num_heads
        kept = int64(state) * state_stride + layer_start
        weights = cuda.local.array((weight_rows, VECTOR), float32)
        if is_convolved:
            load_weights(weights, weight, bias, channel, channels)
        elif has_steps:
            for i in range(pieces):
                load_floats(weights, i, rates, head + VECTOR * i)
                load_floats(weights, pieces + i, time_bias, head + VECTOR * i)
        if is_used and begins and not is_new:
            span = int32(threads * length)
            fetch_kept(states, kept, first_channel, channels, span, cuda.threadIdx.x)
        wait_for_previous()

        if is_convolved:
            moved = int32(2 * key_size)
            if channel >= inner_size + key_size:
                moved = int32(-inner_size - key_size)
            elif channel >= inner_size:
                moved = int32(key_size - inner_size)
            target = token * channels + (channel + moved)
            convolve(
                convolved, target, projections, stride, weights, states, kept, token, count,
                begins, is_new, channel, channels,
            )  # fmt: skip
        elif has_steps:
            steps = cuda.local.array((1, length), float32)
            found = cuda.local.array((found_rows, VECTOR), float32)
            load_vector(steps, 0, projections, token * stride + (channels + inner_size + head))
            for n in range(length):
                i, part = n // VECTOR, n % VECTOR
                time = softplus(add_float32(steps[0, n], weights[pieces + i, part]))
                found[i, part] = time
                found[pieces + i, part] = exp_below_one(multiply_float32(weights[i, part], time))
            for i in range(pieces):
                target = token * (2 * num_heads) + (head + VECTOR * i)
                store_floats(step_sizes, target, found, i)
                store_floats(step_sizes, target + num_heads, found, pieces + i)

    return mamba2_inputs


def _make_load_plain(dtype: str) -> DeviceFunction:
    """Return what reads a vector of v."""
    length, load_vector = VECTOR_LENGTHS[dtype], LOAD_FLOATS[dtype]

    @cuda.jit(device=True, inline="always")
    def load_plain(
        taps: Local,
        i: Scalar,
        projections: Pointer,
        row: Scalar,
        channels: Scalar,  # noqa: ARG001 - v is what lies there
    ) -> None:
        values = cuda.local.array((1, length), float32)
        load_vector(values, 0, projections, row)
        for n in range(length):
            taps[i + n // VECTOR, n % VECTOR] = values[0, n]

    return load_plain


def _make_activate(length: int) -> DeviceFunction:
    """Return what writes silu(sums), float32."""
    pieces, store_floats = length // VECTOR, STORE_FLOATS["float32"]

    @cuda.jit(device=True, inline="always")
    def activate(
        out: Pointer,
        target: Scalar,
        sums: Local,
        projections: Pointer,  # noqa: ARG001 - nothing gates
        row: Scalar,  # noqa: ARG001
        channels: Scalar,  # noqa: ARG001
    ) -> None:
        values = cuda.local.array((pieces, VECTOR), float32)
        for n in range(length):
            values[n // VECTOR, n % VECTOR] = silu(sums[0, n])
        for i in range(pieces):
            store_floats(out, target + VECTOR * i, values, i)

    return activate
