"""RMSNorm of each head by itself, where a head lies on neighbouring threads (`rope_write_kv`).

    heads of a token            │ query 0 … H-1 │ key 0 … G-1   │ value 0 … G-1 │
    what they are multiplied by   query_norm      key_norm        nothing, or 1 / rms alone

The squares of a head are added up by shuffles, over a power of two of threads. Only a head of 512
in float32 has more than a warp, two; their sums meet in shared memory, in the order of warps:

    threads of a block   │ head 0: warp 0 │ warp 1 │ head 1: warp 2 │ warp 3 │
    of_warps                    s0        │   s1   │       s2       │   s3   │    one barrier

Both warps of a head read both sums, so every thread of a head has the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32

from kernels.cuda.instructions.conversions import FULL_WARP, reciprocal_root
from kernels.cuda.instructions.elements import LOAD_CONSTANT_FLOATS, VECTOR_LENGTHS
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.rope_write_kv import RopeWriteKvVariant

WARP = 32


def make_norm_head(variant: RopeWriteKvVariant) -> DeviceFunction:
    """Return norm_head(values, is_mine, turns, head, num_heads, dim, query_norm, key_norm, eps).

    It normalises a thread's pair of vectors, `values`, at element `dim` of a head: with weights if
    that `turns`, those of queries below `num_heads`. Every thread of the block calls it; what is
    not `is_mine` adds nothing.
    """
    head_size, half = variant.head_size, variant.head_size // 2
    length, norm_length = VECTOR_LENGTHS[variant.dtype], VECTOR_LENGTHS[variant.norm_dtype]
    load_norm = LOAD_CONSTANT_FLOATS[variant.norm_dtype]
    pieces = length // norm_length  # of the norm's weights of a vector
    norms_shape = (2 * pieces, norm_length)
    norms_values = variant.norms_values
    head_sum = make_head_sum(variant.head_threads, variant.threads)

    @cuda.jit(device=True, inline="always")
    def load_norms(weights: Local, norm: Pointer, dim: Scalar) -> None:
        """weights[j · pieces + i] = piece i of a vector of the lower half, or of the upper."""
        for j in range(2):
            for i in range(pieces):
                load_norm(weights, j * pieces + i, norm, dim + j * half + i * norm_length)

    @cuda.jit(device=True, inline="always")
    def norm_head(
        values: Local,
        is_mine: Scalar,
        turns: Scalar,
        head: Scalar,
        num_heads: Scalar,
        dim: Scalar,
        query_norm: Pointer,
        key_norm: Pointer,
        eps: Scalar,
    ) -> None:
        squares = float32(0)
        if is_mine:
            for i in range(length):
                for j in range(2):
                    squares += values[j, i] * values[j, i]
        squares = head_sum(squares)
        factor = reciprocal_root(squares / float32(head_size) + eps)
        if turns:
            weights = cuda.local.array(norms_shape, float32)
            if head < num_heads:
                load_norms(weights, query_norm, dim)
            else:
                load_norms(weights, key_norm, dim)
            for i in range(length):
                for j in range(2):
                    own = weights[j * pieces + i // norm_length, i % norm_length]
                    values[j, i] = values[j, i] * factor * own
        elif norms_values:
            for i in range(length):
                for j in range(2):
                    values[j, i] *= factor

    return norm_head


def make_head_sum(head_threads: int, threads: int) -> DeviceFunction:
    """Return head_sum(value), the sum of the values of the threads of a head, in all of them.

    `head_threads`: of a head, a power of two. `threads`: of the block, all of which call it.
    """
    steps = min(head_threads, WARP).bit_length() - 1
    warps = head_threads // WARP  # of a head
    warps_of_block = threads // WARP

    @cuda.jit(device=True, inline="always")
    def lanes_sum(value: Scalar) -> Scalar:
        for step in range(steps):
            value += cuda.shfl_xor_sync(FULL_WARP, value, 1 << step)
        return value

    @cuda.jit(device=True, inline="always")
    def warps_sum(value: Scalar) -> Scalar:
        of_warps = cuda.shared.array(warps_of_block, float32)
        value = lanes_sum(value)
        warp = cuda.threadIdx.x // WARP
        if cuda.threadIdx.x % WARP == 0:
            of_warps[warp] = value
        cuda.syncthreads()
        first = warp // warps * warps
        total = float32(0)
        for other in range(warps):
            total += of_warps[first + other]
        return total

    return lanes_sum if warps <= 1 else warps_sum
