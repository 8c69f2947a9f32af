"""What comes out of a Gated DeltaNet layer's value heads, normalised and gated.

    out[t, h] = rms_norm(heads[t, h]) · weight · silu(z[t, h])          over the Dv elements of h

A warp takes a head of a token, a lane a few neighbours (`head_lanes`): heads in float32 as
`delta_rule` leaves them, z beside the projections that q, k and v came from, `out` in the step's
dtype, the input of a product. Where `delta_rule` has whole heads in one block it does this itself,
by the very same device function, so the bits are the same and what comes out of the heads never
leaves the multiprocessor. This kernel is for steps whose heads it divides among blocks.

Specification: `kernels.reference.delta_net.gated_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int64

from kernels.cuda.activation import silu
from kernels.cuda.head_lanes import HeadLanes, make_load_run, make_store_run
from kernels.cuda.instructions.conversions import reciprocal_root
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.recurrent_states import HEAD_SIZE_STEP, MAX_HEAD_SIZE
from kernels.cuda.variant import (
    STORAGE_TYPES,
    DeviceFunction,
    Expectation,
    Pointer,
    Scalar,
    require_multiple,
    require_one_of,
)

WARPS: Final = 4
"""Of a block."""


@dataclass(frozen=True, slots=True)
class GatedNormVariant:
    """The compile-time parameters: `dtype` of a step, `value_size` Dv of a head.

    That is a multiple of 32 up to 256. Raises UnsupportedVariantError.
    """

    dtype: str
    value_size: int

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_multiple("value_size", HEAD_SIZE_STEP, self.value_size, MAX_HEAD_SIZE)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"gated_norm_{self.dtype}_v{self.value_size}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        return (element, "float32*", element, "int64", "float32*", "float32", "int32")

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(48, ("LDG", "STG", "SHFL", "MUFU"), begins_early=True)

    def grid(self, num_tokens: int, num_value_heads: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (num_tokens, -(-num_value_heads // WARPS), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_gated_norm(self)


def variants(*, every: bool) -> list[GatedNormVariant]:
    """Return a spread of the variants, or those of the models known to us and some others."""
    if every:
        return [
            GatedNormVariant(dtype, size)
            for dtype in STORAGE_TYPES
            for size in (32, 64, 96, 128, 192, 256)
        ]
    return [GatedNormVariant("bfloat16", 128), GatedNormVariant("float32", 96)]


def make_gated_norm(variant: GatedNormVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    value_size = variant.value_size
    norm_head = make_norm_head(variant.dtype, value_size)

    def gated_norm(
        out: Pointer,
        heads: Pointer,
        gates: Pointer,
        stride: Scalar,
        weight: Pointer,
        eps: Scalar,
        num_value_heads: Scalar,
    ) -> None:
        """Normalise and gate one head of token blockIdx.x.

        `out`, `heads`: [T, Hv·Dv], `heads` in float32. `gates`: z, tokens `stride` elements apart,
        a multiple of 16 bytes. `weight`: float32 [Dv].
        """
        let_next_begin()
        lane, warp = lane_and_warp()
        wait_for_previous()
        token = int64(cuda.blockIdx.x)
        head = int64(cuda.blockIdx.y) * WARPS + warp
        if head < num_value_heads:
            at = (token * num_value_heads + head) * value_size
            gate = token * stride + head * value_size
            norm_head(out, at, heads, at, gates, gate, weight, eps, lane)

    return gated_norm


def make_norm_head(dtype: str, value_size: int) -> DeviceFunction:
    """Return norm_head, for a whole warp: one head, from global memory or from shared."""
    lanes = HeadLanes(value_size)
    length, runs = lanes.length, lanes.runs
    load_float, load_gate = make_load_run("float32", length), make_load_run(dtype, length)
    store_run = make_store_run(dtype, length)
    inverse_size = float32(1 / value_size)

    @cuda.jit(device=True, inline="always")
    def norm_head(
        out: Pointer,
        out_at: Scalar,
        heads: Pointer,
        head_at: Scalar,
        gates: Pointer,
        gate_at: Scalar,
        weight: Pointer,
        eps: Scalar,
        lane: Scalar,
    ) -> None:
        """Write the head that begins at `heads[head_at]`, its gates at `gates[gate_at]`."""
        values = cuda.local.array((runs, length), float32)
        own_gates = cuda.local.array((runs, length), float32)
        weights = cuda.local.array((runs, length), float32)
        squares = float32(0)
        for i in range(runs):
            at = (32 * i + lane) * length
            load_gate(own_gates, i, gates, gate_at + at)
            load_float(weights, i, weight, at)
            load_float(values, i, heads, head_at + at)
            for n in range(length):
                squares = multiply_add(values[i, n], values[i, n], squares)
        factor = reciprocal_root(multiply_add(warp_sum(squares), inverse_size, eps))
        for i in range(runs):
            for n in range(length):
                normed = multiply_float32(multiply_float32(values[i, n], factor), weights[i, n])
                values[i, n] = multiply_float32(normed, silu(own_gates[i, n]))
            store_run(out, out_at + (32 * i + lane) * length, values, i)

    return norm_head
