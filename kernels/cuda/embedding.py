"""Token embedding: out[t] = table[token_ids[t]].

The grid is (T tokens, pieces of a row); a thread copies one vector of 16 bytes. The token ids are
read on the device, so that ids sampled by the step before need not pass through the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, int64, uint32

from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.instructions.vectors import load_constant_vector, store_vector
from kernels.cuda.plain_variants import VectorVariant
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar


@dataclass(frozen=True, slots=True)
class EmbeddingVariant(VectorVariant):
    """The compile-time parameter: `dtype` of table and output."""

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"embedding_{self.dtype}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (self.element, self.element, "int32*", "int64")

    @property
    def expectation(self) -> Expectation:
        """A copy: few registers."""
        return Expectation(32, ("LDG.128", "STG.128"))

    def grid(self, num_tokens: int, hidden_size: int) -> tuple[int, int, int]:
        """Return the launch grid; `hidden_size` E must be a multiple of the vector's length."""
        return self.row_grid(num_tokens, "hidden_size", hidden_size)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_embedding(self)


def variants(*, every: bool) -> list[EmbeddingVariant]:
    """Return one of the variants, or every one there is."""
    return [EmbeddingVariant(dtype) for dtype in (STORAGE_TYPES if every else ("bfloat16",))]


def make_embedding(variant: EmbeddingVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    length, threads = VECTOR_LENGTHS[variant.dtype], variant.threads

    def embedding(out: Pointer, table: Pointer, token_ids: Pointer, hidden_size: Scalar) -> None:
        """Copy one vector of row token_ids[blockIdx.x].

        `out`: [T, E]. `table`: [V, E]. `token_ids`: [T], each in 0 to V − 1.
        """
        token = int64(cuda.blockIdx.x)
        element = (int64(cuda.blockIdx.y) * threads + cuda.threadIdx.x) * length
        if element < hidden_size:
            words = cuda.local.array((1, 4), uint32)
            row = int64(token_ids[token]) * hidden_size
            load_constant_vector(words, 0, table, row + element)
            store_vector(out, token * hidden_size + element, words, 0)

    return embedding
