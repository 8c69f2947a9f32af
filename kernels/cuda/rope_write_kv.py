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

The grid is (T tokens, pieces of a token); token t's keys and values go to slot kv_slots[t] =
block · B + offset of the pool [N, L, 2, G, B, D]; a negative slot is padding and writes nothing to
the pool. Angles come from tables by position, in float32, so that a captured graph need not be told
them. Every byte is read and written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.instructions.elements import LOAD_CONSTANT_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.variant import STORAGE_TYPES, Expectation, Pointer, Scalar

HEAD_SIZES = (64, 96, 128)
BLOCK_SIZES = (16, 32)


@dataclass(frozen=True, slots=True)
class RopeWriteKvVariant:
    """The compile-time parameters: `dtype` of `qkv`, pool and `out`, `head_size` D, `block_size` B.

    Raises UnsupportedVariantError for what the kernel is not written for.
    """

    dtype: str
    head_size: int
    block_size: int

    def __post_init__(self) -> None:
        for field, allowed in (
            ("dtype", tuple(STORAGE_TYPES)),
            ("head_size", HEAD_SIZES),
            ("block_size", BLOCK_SIZES),
        ):
            if getattr(self, field) not in allowed:
                choices = ", ".join(map(str, allowed))
                raise UnsupportedVariantError(field, f"one of {choices}", getattr(self, field))

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"rope_write_kv_{self.dtype}_d{self.head_size}_b{self.block_size}"

    @property
    def pairs(self) -> int:
        """Pairs of vectors of a head."""
        return self.head_size // 2 // VECTOR_LENGTHS[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        pointers = (element, element, element, "float32*", "float32*", "int32*", "int64*")
        return (*pointers, "int32", "int32", "int64", "int64", "int64")

    @property
    def expectation(self) -> Expectation:
        """Few registers: as many warps as fit hide the memory's latency."""
        return Expectation(64, ("LDG.128", "STG.128"))

    def grid(self, num_tokens: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, int]:
        """Return the launch grid."""
        of_token = (num_heads + 2 * num_kv_heads) * self.pairs
        return (num_tokens, -(-of_token // self.threads), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_rope_write_kv(self)


def variants(*, every: bool) -> list[RopeWriteKvVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [
            RopeWriteKvVariant(dtype, head_size, block_size)
            for dtype in STORAGE_TYPES
            for head_size in HEAD_SIZES
            for block_size in BLOCK_SIZES
        ]
    return [
        RopeWriteKvVariant("bfloat16", 64, 16),
        RopeWriteKvVariant("float32", 128, 16),
    ]


def make_rope_write_kv(variant: RopeWriteKvVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    head_size, block_size, pairs = variant.head_size, variant.block_size, variant.pairs
    threads = variant.threads
    half = head_size // 2
    length = VECTOR_LENGTHS[variant.dtype]
    angle_vectors = length // 4  # vectors of float32 angles for a vector of elements
    load_constant_floats = LOAD_CONSTANT_FLOATS[variant.dtype]
    load_angles = LOAD_CONSTANT_FLOATS["float32"]
    store_floats = STORE_FLOATS[variant.dtype]

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
    ) -> None:
        """Rotate and place one pair of vectors of token blockIdx.x.

        `out`: [T, H, D]. `qkv`: [T, H + 2·G, D]. `cosines`, `sines`: [positions, D/2] float32.
        `positions`, `kv_slots`: [T]. The last three, in elements, choose the layer of the pool
        (see `attention_decode`).
        """
        token = int64(cuda.blockIdx.x)
        pair = cuda.blockIdx.y * threads + cuda.threadIdx.x
        head = pair // pairs  # among the token's query, key and value heads
        dim = pair % pairs * length
        if head < num_heads + 2 * num_kv_heads:
            values = cuda.local.array((2, length), float32)
            first = (token * (num_heads + 2 * num_kv_heads) + head) * head_size + dim
            load_constant_floats(values, 0, qkv, first)
            load_constant_floats(values, 1, qkv, first + half)

            if head < num_heads + num_kv_heads:
                cosine = cuda.local.array((angle_vectors, 4), float32)
                sine = cuda.local.array((angle_vectors, 4), float32)
                angle = int64(positions[token]) * half + dim
                for i in range(angle_vectors):
                    load_angles(cosine, i, cosines, angle + 4 * i)
                    load_angles(sine, i, sines, angle + 4 * i)
                for i in range(length):
                    low, high = values[0, i], values[1, i]
                    cos, sin = cosine[i // 4, i % 4], sine[i // 4, i % 4]
                    values[0, i] = low * cos - high * sin
                    values[1, i] = high * cos + low * sin

            if head < num_heads:
                target = (token * num_heads + head) * head_size + dim
                store_floats(out, target, values, 0)
                store_floats(out, target + half, values, 1)
            else:
                slot = kv_slots[token]
                if slot >= 0:
                    kv_head = head - num_heads
                    offset = key_offset
                    if kv_head >= num_kv_heads:
                        kv_head -= num_kv_heads
                        offset = value_offset
                    in_block = int64(kv_head) * block_size + slot % block_size
                    target = slot // block_size * block_stride + offset + in_block * head_size + dim
                    store_floats(pool, target, values, 0)
                    store_floats(pool, target + half, values, 1)

    return rope_write_kv
