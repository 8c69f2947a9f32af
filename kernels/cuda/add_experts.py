"""What a token's experts give, weighed and added to the residual stream.

    residual[t, n] += Σ_c weights[t, c] · given[t · C + c, n]

`given` lies by pairs (`expert_tiles`), so a token's C rows are neighbours. The grid is (T tokens,
pieces of a row); a thread makes one vector of 16 bytes of a token, and has what its experts gave
there under way at once:

    given    │ c = 0: 0 … N-1 │ c = 1: 0 … N-1 │ …       one vector read of each
                 ▲ vector v       ▲ vector v
    residual │ 0 … N-1        │
                 ▲ vector v                              read, and written

Experts are added in the order of their logits, fused, in float32, and the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int64

from kernels.cuda.expert_tiles import MAX_EXPERTS_PER_TOKEN
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_add
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar, require_between

AT_ONCE: Final = 4
"""Experts whose vectors are under way together at least: the assembler asks for those of more, as
far as it has registers for them."""

FEW_EXPERTS: Final = 10
"""Of a token. With more, registers are what limits the threads of a multiprocessor."""


@dataclass(frozen=True, slots=True)
class AddExpertsVariant(VectorVariant):
    """The compile-time parameters: `dtype` of all rows, and how many `experts` C a token has."""

    experts: int

    def __post_init__(self) -> None:
        VectorVariant.__post_init__(self)
        require_between("experts", 1, MAX_EXPERTS_PER_TOKEN, self.experts)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"add_experts_{self.dtype}_c{self.experts}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (self.element, self.element, "float32*", "int64")

    @property
    def expectation(self) -> Expectation:
        """Vectors of all experts and one of sums; of 32 experts 3 blocks share a multiprocessor."""
        registers = 80 if self.experts <= FEW_EXPERTS else 176
        return Expectation(registers, ("LDG.128", "STG.128", "FFMA"), begins_early=True)

    def grid(self, num_tokens: int, hidden_size: int) -> tuple[int, int, int]:
        """Return the launch grid; `hidden_size` N must be a multiple of the vector's length."""
        return self.row_grid(num_tokens, "hidden_size", hidden_size)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_add_experts(self)


def variants(*, every: bool) -> Sequence[AddExpertsVariant]:
    """Return one of the variants, or those of the models known to us."""
    if every:
        return [
            AddExpertsVariant(dtype, experts)
            for dtype in STORAGE_TYPES
            for experts in (1, 2, 4, 6, 8, 10, 16, 32)
        ]
    return [AddExpertsVariant("bfloat16", 8)]


def make_add_experts(variant: AddExpertsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    experts, length, threads = variant.experts, VECTOR_LENGTHS[variant.dtype], variant.threads
    load_floats = LOAD_FLOATS[variant.dtype]
    store_floats = STORE_FLOATS[variant.dtype]

    def add_experts(residual: Pointer, given: Pointer, weights: Pointer, num: Scalar) -> None:
        """Add to one vector of token blockIdx.x.

        `residual`: [T, N]. `given`: [T·C, N]. `weights`: [T, C]. `num`: N.
        """
        let_next_begin()
        wait_for_previous()
        token = int64(cuda.blockIdx.x)
        feature = (int64(cuda.blockIdx.y) * threads + cuda.threadIdx.x) * length
        if feature < num:
            sums = cuda.local.array((1, length), float32)
            values = cuda.local.array((AT_ONCE, length), float32)
            before = cuda.local.array((1, length), float32)
            load_floats(before, 0, residual, token * num + feature)
            for i in range(length):
                sums[0, i] = float32(0)
            for first in range(0, experts, AT_ONCE):
                for c in range(AT_ONCE):
                    if first + c < experts:
                        row = token * experts + first + c
                        load_floats(values, c, given, row * num + feature)
                for c in range(AT_ONCE):
                    if first + c < experts:
                        weight = weights[token * experts + first + c]
                        for i in range(length):
                            sums[0, i] = multiply_add(weight, values[c, i], sums[0, i])
            for i in range(length):
                sums[0, i] = add_float32(before[0, i], sums[0, i])
            store_floats(residual, token * num + feature, sums, 0)

    return add_experts
