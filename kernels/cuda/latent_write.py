"""What a token leaves to attention over latents, and what turns of its query heads, in one pass.

    inputs of token t     ├────────── latent, R ──────────┤── turns, P ──┤
    its row of the pool   ├──── normalised · weight ──────┤─── turned ───┤   at slot kv_slots[t]
    each of its H heads   ├──── another kernel's, R ──────┤─── turned ───┤   of queries

    blocks of threads     │ (t, 0): the row │ (t, 1): heads 0 … n-1 │ (t, 2): heads n … 2n-1 │ …

A thread of the row's block has one vector of 16 bytes of the latent, from the read to the write. Of
what turns, half-split as in `rope_write_kv`, a thread has a *pair of vectors*; the row's own P are
turned by the first threads of its block, between the read of the latent and its sum:

    P = 64, 16-bit   │ 0 … 7 │ 8 … 15 │ 16 … 23 │ 24 … 31 ║ 32 … 39 │ 40 … 47 │ 48 … 55 │ …
    thread of n head     0        1         2         3         0         1         2

A negative slot is padding: of that token only query heads are turned. What is read of a token are
columns of wider products' outputs, so that all of it has strides; `queries` has room for the R that
are not written here, where attention reads them beside the P.

What a step is given, angles and weights are read before the launch ahead has ended: they wait for
nobody. Every byte of a token is read and written once.

The squares are summed over a thread's vector, over the warp by a butterfly, over the warps through
shared memory in their order, as in `rms_norm`: the bits depend on the row alone. Specification:
`kernels.reference.latent_attention.write_latents`.

By count, not measured: in 16 bits at R 512, P 64 and 16 heads a token reads 3200 bytes and writes
as many, beside 1 KB of weights and 256 bytes of angles; two blocks of two warps.

The ladder:
  v1  this.
  v2  blocks of several tokens where there are thousands: weights are then read once for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64

from kernels.cuda.attention_variant import BLOCK_SIZES
from kernels.cuda.block_reductions import make_block_sum
from kernels.cuda.instructions.conversions import reciprocal_root
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Local,
    Pointer,
    Scalar,
    require_one_of,
)

RANKS: Final = (256, 512)
TURNING: Final = (32, 64)
MIN_THREADS: Final = 64
"""Of a block: as many as fill a multiprocessor with the most blocks that it holds."""

READ_EARLY: Final = (4, 5, 6, 7, 8)
"""Of the arguments: cosines, sines, positions, kv_slots, weight."""


@dataclass(frozen=True, slots=True)
class LatentWriteVariant:
    """The compile-time parameters: `dtype` of all tensors, R, P and B of the pool.

    `rank` R of a latent, `turning` P elements that turn, of a token's row and of each query head.
    Raises UnsupportedVariantError for what the kernel is not written for.
    """

    dtype: str
    rank: int
    turning: int
    block_size: int

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_one_of("rank", RANKS, self.rank)
        require_one_of("turning", TURNING, self.turning)
        require_one_of("block_size", BLOCK_SIZES, self.block_size)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"latent_write_{self.dtype}_r{self.rank}_p{self.turning}_b{self.block_size}"

    @property
    def num_vectors(self) -> int:
        """16-byte vectors of a latent."""
        return self.rank // VECTOR_LENGTHS[self.dtype]

    @property
    def pairs(self) -> int:
        """Pairs of vectors of what turns, of a row or of a head."""
        return self.turning // 2 // VECTOR_LENGTHS[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block: one vector of a latent each."""
        return max(MIN_THREADS, self.num_vectors)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        given = ("float32*", "float32*", "int32*", "int64*")
        strides = 5 * ("int64",)
        return (*4 * (element,), *given, element, "float32", "int32", *strides)

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        instructions = ("LDG.128", "STG.128", "SHFL", "MUFU", "BAR")
        return Expectation(64, instructions, begins_early=True, reads_early=READ_EARLY)

    def grid(self, num_tokens: int, num_heads: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (num_tokens, 1 + -(-num_heads * self.pairs // self.threads), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_latent_write(self)


def variants(*, every: bool) -> list[LatentWriteVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [
            LatentWriteVariant(dtype, rank, turning, block_size)
            for dtype in STORAGE_TYPES
            for rank in RANKS
            for turning in TURNING
            for block_size in BLOCK_SIZES
        ]
    return [
        LatentWriteVariant("bfloat16", 512, 64, 16),
        LatentWriteVariant("float32", 512, 64, 16),
        LatentWriteVariant("float16", 256, 32, 32),
    ]


def make_latent_write(variant: LatentWriteVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    rank, block_size = variant.rank, variant.block_size
    width, half = rank + variant.turning, variant.turning // 2
    threads, pairs = variant.threads, variant.pairs
    length = VECTOR_LENGTHS[variant.dtype]
    angle_vectors = length // 4  # vectors of float32 angles for a vector of elements
    load_vector, store_vector = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]
    load_angles = LOAD_FLOATS["float32"]
    inverse_rank = float32(1 / rank)
    num_warps = threads // 32
    block_sum = make_block_sum(num_warps)

    @cuda.jit(device=True, inline="always")
    def turn(
        target: Pointer, at: Scalar, source: Pointer, first: Scalar, cosine: Local, sine: Local
    ) -> None:
        """Turn the pair of vectors at source[first], to target[at]: each, and one half behind."""
        values = cuda.local.array((2, length), float32)
        load_vector(values, 0, source, first)
        load_vector(values, 1, source, first + half)
        for n in range(length):
            low, high = values[0, n], values[1, n]
            cos, sin = cosine[n // 4, n % 4], sine[n // 4, n % 4]
            values[0, n] = low * cos - high * sin
            values[1, n] = high * cos + low * sin
        store_vector(target, at, values, 0)
        store_vector(target, at + half, values, 1)

    def latent_write(
        queries: Pointer,
        pool: Pointer,
        inputs: Pointer,
        turning: Pointer,
        cosines: Pointer,
        sines: Pointer,
        positions: Pointer,
        kv_slots: Pointer,
        weight: Pointer,
        eps: Scalar,
        num_heads: Scalar,
        block_stride: Scalar,
        layer_offset: Scalar,
        input_stride: Scalar,
        token_stride: Scalar,
        head_stride: Scalar,
    ) -> None:
        """Write the row of token blockIdx.x (blockIdx.y 0), or turn some of its query heads.

        `queries`: [T, H, R + P]. `pool`: [N, L, 1, 1, B, R + P], blocks `block_stride` elements
        apart, of a layer that begins at `layer_offset`. `inputs`: R + P elements of a token, tokens
        `input_stride` apart. `turning`: P elements of each head, heads `head_stride` apart, tokens
        `token_stride`. `cosines`, `sines`: [positions, P/2] float32. `positions`, `kv_slots`: [T].
        `weight`: [R]. Every tensor begins at a multiple of 16 bytes; strides are multiples of it.
        """
        let_next_begin()
        token = int64(cuda.blockIdx.x)
        thread = int32(cuda.threadIdx.x)
        is_of_row = cuda.blockIdx.y == 0
        pair, num_pairs = thread, int32(pairs)  # of those that this block may turn
        if not is_of_row:
            pair += int32(cuda.blockIdx.y - 1) * threads
            num_pairs = int32(num_heads * pairs)
        head, dim = pair // pairs, pair % pairs * length
        element = thread * length  # of the latent
        position, slot = positions[token], kv_slots[token]
        cosine = cuda.local.array((angle_vectors, 4), float32)
        sine = cuda.local.array((angle_vectors, 4), float32)
        if pair < num_pairs:
            angle = int64(position) * half + dim
            for i in range(angle_vectors):
                load_angles(cosine, i, cosines, angle + 4 * i)
                load_angles(sine, i, sines, angle + 4 * i)
        weights = cuda.local.array((1, length), float32)
        if is_of_row and element < rank:
            load_vector(weights, 0, weight, element)
        wait_for_previous()

        if not is_of_row:
            if pair < num_pairs:
                at = (token * num_heads + head) * width + rank + dim
                first = token * token_stride + head * head_stride + dim
                turn(queries, at, turning, first, cosine, sine)
            return
        if slot < 0:
            return

        sums = cuda.shared.array(num_warps, float32)
        values = cuda.local.array((1, length), float32)
        row = token * input_stride
        place = slot // block_size * block_stride + layer_offset + slot % block_size * width
        if element < rank:
            load_vector(values, 0, inputs, row + element)
        if pair < num_pairs:
            turn(pool, place + rank + dim, inputs, row + rank + dim, cosine, sine)
        squares = float32(0)
        if element < rank:
            for n in range(length):
                squares = multiply_add(values[0, n], values[0, n], squares)
        total = block_sum(squares, sums)
        factor = reciprocal_root(multiply_add(total, inverse_rank, eps))
        if element < rank:
            for n in range(length):
                normed = multiply_float32(values[0, n], factor)
                values[0, n] = multiply_float32(normed, weights[0, n])
            store_vector(pool, place + element, values, 0)

    return latent_write
