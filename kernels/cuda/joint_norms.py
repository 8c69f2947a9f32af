"""Norms of all query heads of a token together, and of all its key heads (OLMo 2), in place.

    row of token t   │ H query heads          │ G key heads   │ G value heads  │
    blocks            (t, 0): rms_norm · w_q    (t, 1): · w_k   as they are

    x · weight / √(mean(x²) + eps)     over the H·D elements of the queries, the G·D of the keys

A block of threads has the queries of a token or its keys, a thread some vectors of 16 bytes, from
the read to the write. `rope_write_kv` follows, and reads what is written here. Numbers are float32
between, rounded once to the step's dtype.

Weights are read before the launch ahead has ended: they wait for nobody.

The squares are summed over a thread's vectors, over the warp by a butterfly, over the warps through
shared memory in their order: the bits depend on the row alone. Specification:
`kernels.reference.rope.normed_together`.

By count, not measured: of 32 heads of 128 with as many of keys a token reads and writes 32 KB, and
as many bytes of weights as of a row.

The ladder:
  v1  this.
  v2  within `rope_write_kv`, whose blocks of a token would agree on two sums through a cluster's
      shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64

from kernels.cuda.block_reductions import make_block_sum
from kernels.cuda.instructions.conversions import reciprocal_root
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Pointer,
    Scalar,
    require_multiple,
    require_one_of,
)

READ_EARLY: Final = (1, 2)
"""Of the arguments: query_norm, key_norm."""
MAX_THREADS: Final = 512
MAX_SIZE: Final = 16384


@dataclass(frozen=True, slots=True)
class JointNormsVariant:
    """The compile-time parameters: `dtype` of all, elements of all query heads and of all keys'.

    Multiples of 16 bytes, the keys' not more than the queries', up to 16384. Raises
    UnsupportedVariantError.
    """

    dtype: str
    query_size: int
    key_size: int

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        length = VECTOR_LENGTHS[self.dtype]
        require_multiple("query_size", length, self.query_size, MAX_SIZE)
        require_multiple("key_size", length, self.key_size, self.query_size)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"joint_norms_{self.dtype}_q{self.query_size}_k{self.key_size}"

    @property
    def num_vectors(self) -> int:
        """16-byte vectors of a token's queries."""
        return self.query_size // VECTOR_LENGTHS[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block: one vector each if that is enough, whole warps."""
        return min(MAX_THREADS, -(-self.num_vectors // 32) * 32)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        return (element, element, element, "float32")

    @property
    def expectation(self) -> Expectation:
        """A thread holds up to eight vectors of a row at the largest size, and their weights."""
        instructions = ("LDG.128", "STG.128", "SHFL", "MUFU")
        return Expectation(128, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (num_tokens, 2, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_joint_norms(self)


def variants(*, every: bool) -> list[JointNormsVariant]:
    """Return a spread of the variants, or the sizes of all models known to us and some others."""
    if every:
        sizes = ((2048, 2048), (4096, 4096), (5120, 5120), (5120, 1024), (96, 32), (16384, 64))
        return [JointNormsVariant(dtype, *both) for dtype in STORAGE_TYPES for both in sizes]
    return [
        JointNormsVariant("bfloat16", 5120, 1024),
        JointNormsVariant("float32", 2048, 2048),
        JointNormsVariant("float16", 96, 32),
    ]


def make_joint_norms(variant: JointNormsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    threads, length = variant.threads, VECTOR_LENGTHS[variant.dtype]
    query_size, key_size = variant.query_size, variant.key_size
    stride = query_size + 2 * key_size
    rounds = -(-variant.num_vectors // threads)  # vectors of a thread
    num_warps = threads // 32
    inverse_query_size, inverse_key_size = float32(1 / query_size), float32(1 / key_size)
    load_vector, store_vector = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]
    block_sum = make_block_sum(num_warps)

    def joint_norms(qkv: Pointer, query_norm: Pointer, key_norm: Pointer, eps: Scalar) -> None:
        """Normalise the queries of token blockIdx.x, or its keys (blockIdx.y 1).

        `qkv`: [T, (H + 2·G)·D]. `query_norm`: [H·D]; `key_norm`: [G·D].
        """
        let_next_begin()
        is_of_keys = cuda.blockIdx.y == 1
        thread = int32(cuda.threadIdx.x)
        size = int32(key_size if is_of_keys else query_size)
        row = int64(cuda.blockIdx.x) * stride
        if is_of_keys:
            row += query_size
        weights = cuda.local.array((rounds, length), float32)
        for r in range(rounds):
            element = (thread + r * threads) * length
            if element < size:
                if is_of_keys:
                    load_vector(weights, r, key_norm, element)
                else:
                    load_vector(weights, r, query_norm, element)
        wait_for_previous()

        sums = cuda.shared.array(num_warps, float32)
        values = cuda.local.array((rounds, length), float32)
        squares = float32(0)
        for r in range(rounds):
            element = (thread + r * threads) * length
            if element < size:
                load_vector(values, r, qkv, row + element)
                for n in range(length):
                    squares = multiply_add(values[r, n], values[r, n], squares)
        total = block_sum(squares, sums)
        inverse_size = inverse_key_size if is_of_keys else inverse_query_size
        factor = reciprocal_root(multiply_add(total, inverse_size, eps))
        for r in range(rounds):
            element = (thread + r * threads) * length
            if element < size:
                for n in range(length):
                    normed = multiply_float32(values[r, n], factor)
                    values[r, n] = multiply_float32(normed, weights[r, n])
                store_vector(qkv, row + element, values, r)

    return joint_norms
