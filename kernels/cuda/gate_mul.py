"""The gate of the feed-forward layer: out[t, f] = a(gate[t, f]) · up[t, f] (Shazeer 2020).

a is the model's activation, SiLU or GELU, or both are clamped and 1 added to up (`activation`).

`gate_up` is [T, 2·F]: F gate values, then F up values of each token; `out` is [T, F]. The grid is
(T tokens, pieces of a row); a thread makes one vector of 16 bytes:

    gate_up, row t   │ gate 0 … F-1          │ up 0 … F-1            │
                       ▲ vector v              ▲ vector v              one read each
    out, row t       │ 0 … F-1               │
                       ▲ vector v

Where a quantised matrix has both in turns (`quantized_matmul`), so has what it gave: 16 gate
values, their 16 up values, the next 16 gate values, …

Blocks behind the pieces of rows fetch what the next launch reads, if it is a library's product
(`fetched_weights`).

Nothing is read twice and nothing is shared: the speed is the memory's, 3 · 2 bytes an output in a
16-bit type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.activation import GATES, SILU
from kernels.cuda.fetched_weights import ARGUMENTS, NOTHING, FetchPlan, fetch_chunks
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.quantized_formats import GATE_TURN
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Pointer,
    Scalar,
    require_multiple,
    require_one_of,
)


@dataclass(frozen=True, slots=True)
class GateMulVariant(VectorVariant):
    """The compile-time parameters: `dtype` of `gate_up` and `out`; whether gates lie `in_turns`.

    `activation`: of the gate. Raises UnsupportedVariantError for another one.
    """

    in_turns: bool = False
    activation: str = SILU

    def __post_init__(self) -> None:
        VectorVariant.__post_init__(self)
        require_one_of("activation", GATES, self.activation)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"{self.activation}_mul_{self.dtype}" + ("_in_turns" if self.in_turns else "")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (self.element, self.element, "int64", self.element, *ARGUMENTS)

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(40, ("LDG.128", "STG.128"), begins_early=True)

    def grid(
        self, num_tokens: int, num_features: int, fetched: FetchPlan = NOTHING
    ) -> tuple[int, int, int]:
        """Return the launch grid; `num_features` F must be a multiple of the vector's length.

        And of a turn. `fetched`: of the next product's weights. Raises UnsupportedVariantError.
        """
        if self.in_turns:
            require_multiple("num_features", GATE_TURN, num_features)
        rows, pieces, _ = self.row_grid(num_tokens, "num_features", num_features)
        return (rows, pieces + fetched.num_columns(num_tokens), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_gate_mul(self)


def variants(*, every: bool) -> list[GateMulVariant]:
    """Return a spread of the variants, or every one there is."""
    if not every:
        return [
            GateMulVariant("bfloat16"),
            GateMulVariant("float16", in_turns=True),
            GateMulVariant("bfloat16", activation="gelu"),
            GateMulVariant("bfloat16", in_turns=True, activation="clamped"),
        ]
    return [
        GateMulVariant(dtype, in_turns, activation)
        for activation in GATES
        for dtype in STORAGE_TYPES
        for in_turns in (False, True)
    ]


def make_gate_mul(variant: GateMulVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    length, threads = VECTOR_LENGTHS[variant.dtype], variant.threads
    in_turns = variant.in_turns
    gated = GATES[variant.activation]
    load_floats = LOAD_FLOATS[variant.dtype]
    store_floats = STORE_FLOATS[variant.dtype]

    def gate_mul(
        out: Pointer,
        gate_up: Pointer,
        num_features: Scalar,
        next_weights: Pointer,
        num_chunks: Scalar,
        chunk_pitch: Scalar,
        chunk_bytes: Scalar,
    ) -> None:
        """Write one vector of row blockIdx.x. `gate_up`: [T, 2·F]; `out`: [T, F].

        `next_weights` and what follows: as in `FetchPlan`.
        """
        let_next_begin()
        first_feature = int64(cuda.blockIdx.y) * threads * length
        if first_feature >= num_features:
            pieces = (num_features + threads * length - 1) // (threads * length)
            block = (cuda.blockIdx.y - pieces) * cuda.gridDim.x + cuda.blockIdx.x
            num_blocks = (cuda.gridDim.y - pieces) * cuda.gridDim.x
            fetch_chunks(next_weights, num_chunks, chunk_pitch, chunk_bytes, block, num_blocks)
        wait_for_previous()
        token = int64(cuda.blockIdx.x)
        feature = first_feature + cuda.threadIdx.x * length
        if feature < num_features:
            values = cuda.local.array((2, length), float32)
            gate = token * 2 * num_features + feature
            up = gate + num_features
            if in_turns:
                gate += feature // GATE_TURN * GATE_TURN
                up = gate + GATE_TURN
            load_floats(values, 0, gate_up, gate)
            load_floats(values, 1, gate_up, up)
            for i in range(length):
                values[0, i] = gated(values[0, i], values[1, i])
            store_floats(out, token * num_features + feature, values, 0)

    return gate_mul
