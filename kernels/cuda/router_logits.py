"""What a mixture's router says of each token: logits[t, e] = Σ_k x[t, k] · router[e, k], + bias[e].

In float32 whatever x is, since which experts a token goes through hangs on small differences (ADR
0032). The router is small, a megabyte where there are 128 experts of 2048 inputs, and its product
has few outputs; a library's product of so few rows gives it to a handful of multiprocessors.

A warp takes one expert and up to `tokens` tokens, a lane vectors of eight neighbouring k's:

    k          0 … 7 │ 8 … 15 │ …    │ 248 … 255 │ 256 …         a round of the warp is 256 k's:
    lane         0   │   1    │      │    31     │  0            32 bytes of the router a lane, and
                                                                 16 of each token

Read once for all its tokens, the router's vectors are multiplied from registers. A block is 4
warps, so 128 experts and a token are 32 blocks. A lane sums its k's in order, fused, the warp by a
butterfly: a logit's bits depend on its token and its expert alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int64

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import (
    LOAD_CONSTANT_FLOATS,
    LOAD_FLOATS,
    VECTOR_LENGTHS,
)
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_add
from kernels.cuda.lanes import lane_and_warp, warp_sum
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Pointer,
    Scalar,
    require_multiple,
    require_one_of,
)

DTYPES: Final = ("bfloat16", "float16")
TOKENS: Final = (1, 8)
"""Tokens of a warp: a variant each."""
WARPS: Final = 4
"""Of a block."""
ROUTER_VECTOR: Final = VECTOR_LENGTHS["float32"]
"""Elements of the router that a lane reads at once."""


@dataclass(frozen=True, slots=True)
class RouterLogitsVariant:
    """The compile-time parameters: `dtype` of x, and the `tokens` of a warp.

    `biased`: each expert has a bias. Raises UnsupportedVariantError for what the kernel is not
    written for.
    """

    dtype: str
    tokens: int
    biased: bool = False

    def __post_init__(self) -> None:
        require_one_of("dtype", DTYPES, self.dtype)
        require_one_of("tokens", TOKENS, self.tokens)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"router_logits_{self.dtype}_t{self.tokens}" + ("_biased" if self.biased else "")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        return ("float32*", element, "float32*", "int64", "int64", "int64", "float32*")

    @property
    def expectation(self) -> Expectation:
        """Few enough for five blocks to a multiprocessor."""
        return Expectation(96, ("LDG.128", "FFMA", "SHFL"), begins_early=True)

    def grid(self, num_tokens: int, num_experts: int, hidden_size: int) -> tuple[int, int, int]:
        """Return the launch grid. Raises UnsupportedVariantError."""
        for field, value in (("num_tokens", num_tokens), ("num_experts", num_experts)):
            if value < 1:
                raise UnsupportedVariantError(field, "at least 1", value)
        require_multiple("hidden_size", VECTOR_LENGTHS[self.dtype], hidden_size)
        return (-(-num_experts // WARPS), -(-num_tokens // self.tokens), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_router_logits(self)


def tokens_of(num_tokens: int) -> int:
    """Return the `tokens` of the variant for so many."""
    return TOKENS[0] if num_tokens == 1 else TOKENS[1]


def variants(*, every: bool) -> Sequence[RouterLogitsVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [
            RouterLogitsVariant(dtype, tokens, biased)
            for dtype in DTYPES
            for tokens in TOKENS
            for biased in (False, True)
        ]
    return [RouterLogitsVariant("bfloat16", 8), RouterLogitsVariant("float16", 1)]


def make_router_logits(variant: RouterLogitsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    tokens, biased = variant.tokens, variant.biased
    length = VECTOR_LENGTHS[variant.dtype]
    parts = length // ROUTER_VECTOR
    load_floats = LOAD_FLOATS[variant.dtype]
    load_router = LOAD_CONSTANT_FLOATS["float32"]

    def router_logits(
        out: Pointer,
        x: Pointer,
        router: Pointer,
        num_tokens: Scalar,
        num_experts: Scalar,
        hidden_size: Scalar,
        biases: Pointer,
    ) -> None:
        """Write the logits of `tokens` tokens, from blockIdx.y, for 4 experts, from blockIdx.x.

        `out`: [T, E]. `x`: [T, hidden]. `router`: [E, hidden]. `biases`: [E]; not touched where
        there are none.
        """
        let_next_begin()
        wait_for_previous()
        lane, warp = lane_and_warp()
        expert = int64(cuda.blockIdx.x) * WARPS + warp
        first_token = int64(cuda.blockIdx.y) * tokens
        if expert < num_experts:
            weights = cuda.local.array((parts, ROUTER_VECTOR), float32)
            values = cuda.local.array((1, length), float32)
            sums = cuda.local.array(tokens, float32)
            for t in range(tokens):
                sums[t] = float32(0)
            for first in range(lane * length, hidden_size, 32 * length):
                for part in range(parts):
                    at = expert * hidden_size + first + part * ROUTER_VECTOR
                    load_router(weights, part, router, at)
                for t in range(tokens):
                    # Tokens behind the last one repeat it: what becomes of them is not written.
                    token = min(first_token + t, num_tokens - 1)
                    load_floats(values, 0, x, token * hidden_size + first)
                    for i in range(length):
                        weight = weights[i // ROUTER_VECTOR, i % ROUTER_VECTOR]
                        sums[t] = multiply_add(values[0, i], weight, sums[t])
            for t in range(tokens):
                total = warp_sum(sums[t])
                if lane == 0 and first_token + t < num_tokens:
                    if biased:
                        total = add_float32(total, biases[expert])
                    out[(first_token + t) * num_experts + expert] = total

    return router_logits
