"""Rotary position embedding and the write of K and V into the block pool, in one pass.

Half-split convention (Hugging Face checkpoints): element d of a head is paired with d + D/2,
    out[d]       = x[d]       · cos[d] − x[d + D/2] · sin[d]
    out[d + D/2] = x[d + D/2] · cos[d] + x[d]       · sin[d]

`qkv` holds of each token H query heads, G key heads and G value heads. A thread takes one *pair of
vectors* of a head, 16 bytes of the lower half and the 16 bytes they are paired with:

    a head of D = 64, 16-bit:   │ 0 … 7 │ 8 … 15 │ 16 … 23 │ 24 … 31 ║ 32 … 39 │ 40 … 47 │ …
    thread                          0        1         2         3         0         1

    heads of a token            │ query 0 … H-1 │ key 0 … G-1   │ value 0 … G-1 │
    what becomes of them          rotated, out    rotated, pool   as it is, pool

The pool may have eight bits a number (`kv_dtype`; drawn in `quantized_kv`). Then the threads of a
head agree on its largest magnitude, by shuffles, before they write; to that end they are a power of
two, 8 at D 96, two of which have nothing to do (`head_scales`). Keys are quantised as they come
from the rotation, in float32, by the specification's own operations.

Some architectures change heads before: a bias is added (`has_bias`), query and key heads are
normalised (`has_head_norms`; `kernels.reference.rope.HeadChanges`), and value heads too without
weights (`norms_values`; Gemma 4), all of it in float32. For a norm the threads of a head are a
power of two again (`head_norms`); its weights may be float32 (`has_float32_norms`; `rms_norm` says
why). Queries that grow are multiplied by a factor of their position when they have turned.

The grid is (T tokens, pieces of a token); token t's keys and values go to slot kv_slots[t] =
block · B + offset of the pool [N, L, 2, G, B, D]; a negative slot is padding and writes nothing to
the pool. Angles come from tables by position, in float32, so that a captured graph need not be told
them. Every byte is read and written once. A layer that attends to what an earlier one wrote has
G = 0: queries alone turn, and the pool is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.attention_variant import BLOCK_SIZES
from kernels.cuda.head_norms import WARP, make_norm_head
from kernels.cuda.head_scales import make_scale_head
from kernels.cuda.instructions.conversions import float32_to_word
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.eight_bits import STORE_CODES
from kernels.cuda.instructions.elements import (
    LOAD_CONSTANT_FLOATS,
    LOAD_FLOATS,
    STORE_FLOATS,
    VECTOR_LENGTHS,
)
from kernels.cuda.instructions.vectors import store_word
from kernels.cuda.quantized_kv import (
    POOL_DTYPES,
    SCALE_BYTES,
    head_bytes,
    pool_pointer,
    pool_suffix,
    require_pool_dtype,
)
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar, require_one_of

HEAD_SIZES = (64, 96, 128, 256, 512)
"""One more than attention's own kernels have."""

READ_EARLY = (3, 4, 5, 6)
"""Of the arguments: cosines, sines, positions, kv_slots."""
GROWTH = 16
"""Among them: the factors by which queries grow."""


@dataclass(frozen=True, slots=True)
class RopeWriteKvVariant:
    """The compile-time parameters: `dtype` of `qkv` and `out`, `head_size` D, `block_size` B.

    The pool has that dtype too unless `kv_dtype` is given: "int8" or "float8", with 16-bit floats
    only. `has_bias`, `has_head_norms`: what is done with heads before they are rotated;
    `has_float32_norms`: the norms' weights are float32; `queries_grow`: queries are multiplied by a
    factor of their position; `norms_values`: value heads are normalised as well, without weights.
    Raises UnsupportedVariantError for what the kernel is not written for.
    """

    dtype: str
    head_size: int
    block_size: int
    kv_dtype: str | None = None
    has_bias: bool = False
    has_head_norms: bool = False
    has_float32_norms: bool = False
    queries_grow: bool = False
    norms_values: bool = False

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_one_of("head_size", HEAD_SIZES, self.head_size)
        require_one_of("block_size", BLOCK_SIZES, self.block_size)
        require_pool_dtype(self.dtype, self.kv_dtype)
        if self.has_float32_norms or self.norms_values:
            require_one_of("has_head_norms", (True,), self.has_head_norms)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        shape = f"d{self.head_size}_b{self.block_size}"
        norms = "_float32_norms" if self.has_float32_norms else "_norms"
        changes = "_bias" * self.has_bias + norms * self.has_head_norms
        changes += "_grows" * self.queries_grow + "_normed_values" * self.norms_values
        return f"rope_write_kv_{self.dtype}_{shape}{pool_suffix(self.kv_dtype)}{changes}"

    @property
    def norm_dtype(self) -> str:
        """The dtype of the norms' weights."""
        return "float32" if self.has_float32_norms else self.dtype

    @property
    def pairs(self) -> int:
        """Pairs of vectors of a head."""
        return self.head_size // 2 // VECTOR_LENGTHS[self.dtype]

    @property
    def has_shuffles(self) -> bool:
        """Whether the threads of a head tell each other anything."""
        return self.kv_dtype is not None or self.has_head_norms

    @property
    def head_threads(self) -> int:
        """Threads of a head: a pair each, and for shuffles a power of two."""
        return 1 << (self.pairs - 1).bit_length() if self.has_shuffles else self.pairs

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        pool = pool_pointer(self.dtype, self.kv_dtype)
        pointers = (element, pool, element, "float32*", "float32*", "int32*", "int64*")
        norm = STORAGE_TYPES[self.norm_dtype] + "*"
        changes = (element, norm, norm, "float32")
        growth = ("float32*", "int32")
        return (*pointers, "int32", "int32", "int64", "int64", "int64", *changes, *growth)

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency.

        Weights of 32 bits of norms take some more.
        """
        registers = 72 if self.has_float32_norms else 64
        shuffles = ("SHFL",) if self.has_shuffles else ()
        barriers = ("BAR",) if self.has_head_norms and self.head_threads > WARP else ()
        instructions = ("LDG.128", "STG.128", *shuffles, *barriers)
        reads_early = (*READ_EARLY, *((GROWTH,) if self.queries_grow else ()))
        return Expectation(registers, instructions, begins_early=True, reads_early=reads_early)

    def grid(self, num_tokens: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        of_token = (num_heads + 2 * num_kv_heads) * self.head_threads
        return (num_tokens, -(-of_token // self.threads), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_rope_write_kv(self)


def variants(*, every: bool) -> list[RopeWriteKvVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return (
            [
                RopeWriteKvVariant(dtype, head_size, block_size, kv_dtype, has_bias, has_head_norms)
                for has_bias, has_head_norms in ((False, False), (True, False), (False, True))
                for dtype, kv_dtype in POOL_DTYPES
                for head_size in (64, 96, 128, 256)
                for block_size in BLOCK_SIZES
            ]
            + [
                RopeWriteKvVariant(dtype, head_size, block_size, kv_dtype, False, True, True)
                for dtype, kv_dtype in POOL_DTYPES
                for head_size in (128, 256)
                for block_size in BLOCK_SIZES
            ]
            + [
                RopeWriteKvVariant(dtype, 128, block_size, kv_dtype, queries_grow=True)
                for dtype, kv_dtype in POOL_DTYPES
                for block_size in BLOCK_SIZES
            ]
            + [
                RopeWriteKvVariant(
                    dtype, head_size, block_size, kv_dtype, has_head_norms=True, norms_values=True
                )
                for dtype, kv_dtype in POOL_DTYPES
                for head_size in (256, 512)
                for block_size in BLOCK_SIZES
            ]
            + [RopeWriteKvVariant(dtype, 512, 16) for dtype in STORAGE_TYPES]
        )
    return [
        RopeWriteKvVariant("bfloat16", 64, 16),
        RopeWriteKvVariant("float32", 128, 16),
        RopeWriteKvVariant("float16", 96, 16, "float8"),
        RopeWriteKvVariant("bfloat16", 128, 16, has_bias=True),
        RopeWriteKvVariant("bfloat16", 128, 16, "float8", has_head_norms=True),
        RopeWriteKvVariant("bfloat16", 256, 16, None, False, True, True),
        RopeWriteKvVariant("bfloat16", 512, 16, has_head_norms=True, norms_values=True),
        RopeWriteKvVariant("float32", 512, 16, has_head_norms=True, norms_values=True),
    ]


def make_rope_write_kv(variant: RopeWriteKvVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    head_size, block_size, kv_dtype = variant.head_size, variant.block_size, variant.kv_dtype
    threads, head_threads = variant.threads, variant.head_threads
    has_idle_threads = head_threads > variant.pairs
    half = head_size // 2
    length = VECTOR_LENGTHS[variant.dtype]
    angle_vectors = length // 4  # vectors of float32 angles for a vector of elements
    load_floats = LOAD_FLOATS[variant.dtype]
    load_constant_floats = LOAD_CONSTANT_FLOATS[variant.dtype]
    norm_head, scale_head = make_norm_head(variant), make_scale_head(variant)
    load_angles = LOAD_FLOATS["float32"]
    store_floats = STORE_FLOATS[variant.dtype]
    if kv_dtype is None:
        head_elements, write_heads = block_size * head_size, store_floats
    else:
        head_elements, write_heads = head_bytes(head_size, block_size), STORE_CODES[kv_dtype]
    has_scales = kv_dtype is not None
    has_bias, has_head_norms = variant.has_bias, variant.has_head_norms
    queries_grow = variant.queries_grow

    def rope_write_kv(
        out: Pointer,
        pool: Pointer,
        qkv: Pointer,
        cosines: Pointer,
        sines: Pointer,
        positions: Pointer,
        kv_slots: Pointer,
        num_heads: Scalar,
        num_kv_heads: Scalar,
        block_stride: Scalar,
        key_offset: Scalar,
        value_offset: Scalar,
        bias: Pointer,
        query_norm: Pointer,
        key_norm: Pointer,
        eps: Scalar,
        growth: Pointer,
        growth_length: Scalar,
    ) -> None:
        """Rotate and place one pair of vectors of token blockIdx.x.

        `out`: [T, H, D]. `qkv`: [T, H + 2·G, D]. `cosines`, `sines`: [positions, D/2] float32.
        `positions`, `kv_slots`: [T]. `block_stride`, `key_offset`, `value_offset`, in elements of
        the pool, choose its layer (see `attention_decode`). `bias`: [H + 2·G, D]; `query_norm`,
        `key_norm`: [D]; `growth`: float32 [n], factors of queries at positions from
        i · `growth_length` on; what the variant does not have is not touched.
        """
        let_next_begin()
        token = int64(cuda.blockIdx.x)
        pair = cuda.blockIdx.y * threads + cuda.threadIdx.x
        head = pair // head_threads  # among the token's query, key and value heads
        dim = pair % head_threads * length
        is_mine = head < num_heads + 2 * num_kv_heads
        if has_idle_threads:
            is_mine = is_mine and dim < half
        # What a step is given, and angles, before the launch ahead has ended: behind it each would
        # wait for a way to memory of its own. Ordinary reads: none of them is moved over the wait.
        position, slot = positions[token], kv_slots[token]
        turns = is_mine and head < num_heads + num_kv_heads
        cosine = cuda.local.array((angle_vectors, 4), float32)
        sine = cuda.local.array((angle_vectors, 4), float32)
        if turns:
            angle = int64(position) * half + dim
            for i in range(angle_vectors):
                load_angles(cosine, i, cosines, angle + 4 * i)
                load_angles(sine, i, sines, angle + 4 * i)
        grown = float32(1)
        if queries_grow and is_mine and head < num_heads:
            grown = growth[position // growth_length]
        wait_for_previous()

        values = cuda.local.array((2, length), float32)
        if is_mine:
            first = (token * (num_heads + 2 * num_kv_heads) + head) * head_size + dim
            load_floats(values, 0, qkv, first)
            load_floats(values, 1, qkv, first + half)
            if has_bias:
                added = cuda.local.array((2, length), float32)
                load_constant_floats(added, 0, bias, head * head_size + dim)
                load_constant_floats(added, 1, bias, head * head_size + dim + half)
                for i in range(length):
                    for j in range(2):
                        values[j, i] += added[j, i]

        if has_head_norms:
            norm_head(values, is_mine, turns, head, num_heads, dim, query_norm, key_norm, eps)

        if is_mine:
            if turns:
                for i in range(length):
                    low, high = values[0, i], values[1, i]
                    cos, sin = cosine[i // 4, i % 4], sine[i // 4, i % 4]
                    values[0, i] = low * cos - high * sin
                    values[1, i] = high * cos + low * sin

            if head < num_heads:
                if queries_grow:
                    for i in range(length):
                        for j in range(2):
                            values[j, i] *= grown
                target = (token * num_heads + head) * head_size + dim
                store_floats(out, target, values, 0)
                store_floats(out, target + half, values, 1)

        scale = float32(0)
        if has_scales:
            scale = scale_head(values, is_mine)

        if is_mine and head >= num_heads and slot >= 0:
            kv_head = head - num_heads
            offset = key_offset
            if kv_head >= num_kv_heads:
                kv_head -= num_kv_heads
                offset = value_offset
            place = slot // block_size * block_stride + offset + int64(kv_head) * head_elements
            target = place + slot % block_size * head_size + dim
            write_heads(pool, target, values, 0)
            write_heads(pool, target + half, values, 1)
            if has_scales and dim == 0:
                place += block_size * head_size + slot % block_size * SCALE_BYTES
                store_word(pool, place, float32_to_word(scale))

    return rope_write_kv
