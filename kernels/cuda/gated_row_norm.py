"""What comes out of a Mamba-2 layer's heads, gated and normalised together.

    g       = heads[t] · silu(z[t])
    out[t]  = g · weight / √(mean(g²) + eps)        over the elements of a group of heads, or of all
              or g, in models without a norm there (Falcon-H1)

One block of threads for each group of a token; a thread keeps its vectors of g from the read to the
write:

    row t      │ vector 0 │ vector 1 │ … │ vector P-1 │ vector P │ …
    thread          0          1              P-1          0           P threads

heads are float32 as `selective_scan` leaves them, z beside the projections that x, b and c came
from, `out` is in the step's dtype, the input of a product; norm and products are float32.

Weights, and which row a token is of, are read before the launch ahead has ended: they wait for
nobody, and are as much as the heads are. A token that is in no row has nothing there that could be
read, and what it has in `out` stays (`recurrent_states`).

The squares are summed over a thread's vectors, over the warp by a butterfly, over the warps through
shared memory in the order of warps: the bits depend on the row alone. Specification:
`kernels.reference.mamba2.gated_norm`.

By count, not measured: of 4096 elements a token reads 24 KB and writes 8, and 16 KB of weights; a
decoding token that is alone has one multiprocessor for it, 0.2 µs behind the launch ahead.

The ladder:
  v1  this.
  v2  blocks beside those of rows fetch what the next product reads, as beside `rms_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64

from kernels.cuda.activation import silu
from kernels.cuda.block_reductions import make_block_sum
from kernels.cuda.instructions.conversions import reciprocal_root
from kernels.cuda.instructions.early_launch import let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import LOAD_FLOATS, STORE_FLOATS, VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.recurrent_states import HEAD_SIZE_STEP, VECTOR, find_row
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Pointer,
    Scalar,
    require_multiple,
    require_one_of,
)

READ_EARLY: Final = (4, 6, 7)
"""Of the arguments: weight, token_rows, rows."""
READ_EARLY_PLAIN: Final = READ_EARLY[1:]
"""The same without a norm."""
MAX_THREADS: Final = 512
MAX_SIZE: Final = 16384


@dataclass(frozen=True, slots=True)
class GatedRowNormVariant:
    """The compile-time parameters: `dtype` of a step, `size` H·P/G of a group, `is_normed`.

    `size` is a multiple of 32 up to 16384. Where nothing is normalised weight and eps are not read.
    Raises UnsupportedVariantError.
    """

    dtype: str
    size: int
    is_normed: bool = True

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_multiple("size", HEAD_SIZE_STEP, self.size, MAX_SIZE)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"gated_row_norm_{self.dtype}_i{self.size}{'' if self.is_normed else '_plain'}"

    @property
    def num_vectors(self) -> int:
        """16-byte vectors of a group's gates."""
        return self.size // VECTOR_LENGTHS[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block: one vector each if that is enough, whole warps."""
        return min(MAX_THREADS, -(-self.num_vectors // 32) * 32)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        rows = ("int32*", "int32*")
        return (element, "float32*", element, "int64", "float32*", "float32", *rows)

    @property
    def expectation(self) -> Expectation:
        """A thread holds up to eight vectors of float32 at the largest size, and their weights."""
        instructions = ("LDG.128", "STG.128", *["SHFL"] * self.is_normed, "MUFU")
        early = READ_EARLY if self.is_normed else READ_EARLY_PLAIN
        return Expectation(128, instructions, begins_early=True, reads_early=early)

    def grid(self, num_tokens: int, num_groups: int = 1) -> tuple[int, int, int]:
        """Return the launch grid."""
        return (num_tokens, num_groups, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_gated_row_norm(self)


def variants(*, every: bool) -> list[GatedRowNormVariant]:
    """Return a spread of the variants, or the sizes of all models known to us and some others."""
    if every:
        sizes = (96, 512, 1280, 1536, 3072, 4096, 8192, 16384)
        return [
            GatedRowNormVariant(dtype, size, is_normed)
            for dtype in STORAGE_TYPES
            for size in sizes
            for is_normed in (True, False)
        ]
    return [
        GatedRowNormVariant("bfloat16", 8192),
        GatedRowNormVariant("bfloat16", 3072, is_normed=False),
        GatedRowNormVariant("float32", 3072),
        GatedRowNormVariant("float16", 96),
    ]


def make_gated_row_norm(variant: GatedRowNormVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    size, num_vectors, threads = variant.size, variant.num_vectors, variant.threads
    is_normed = variant.is_normed
    length = VECTOR_LENGTHS[variant.dtype]
    pieces = length // VECTOR
    rounds = -(-num_vectors // threads)  # vectors of a thread
    weight_rows = rounds * pieces
    num_warps = threads // 32
    inverse_size = float32(1 / size)
    load_vector, store_vector = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]
    load_floats = LOAD_FLOATS["float32"]
    block_sum = make_block_sum(num_warps)

    def gated_row_norm(
        out: Pointer,
        heads: Pointer,
        gates: Pointer,
        stride: Scalar,
        weight: Pointer,
        eps: Scalar,
        token_rows: Pointer,
        rows: Pointer,
    ) -> None:
        """Gate and normalise group blockIdx.y of token blockIdx.x.

        `out`, `heads`: [T, H·P], `heads` in float32. `gates`: z, tokens `stride` elements apart, a
        multiple of 16 bytes. `weight`: float32 [H·P]. The others: as in `recurrent_states`.
        """
        let_next_begin()
        token = int64(cuda.blockIdx.x)
        thread = int32(cuda.threadIdx.x)
        own = int32(cuda.blockIdx.y * size)  # where the group begins
        first, count, _, _ = find_row(rows, int64(token_rows[token]))
        place = int32(token - first)  # in its row
        weights = cuda.local.array((weight_rows, VECTOR), float32)
        if is_normed:
            for r in range(rounds):
                vector = thread + r * threads
                if vector < num_vectors:
                    for i in range(pieces):
                        at = own + vector * length + VECTOR * i
                        load_floats(weights, r * pieces + i, weight, at)
        wait_for_previous()
        if place < 0 or place >= count:
            return

        row = token * (cuda.gridDim.y * size) + own
        sums = cuda.shared.array(num_warps, float32)
        values = cuda.local.array((rounds, length), float32)
        heads_here = cuda.local.array((pieces, VECTOR), float32)
        squares = float32(0)
        for r in range(rounds):
            vector = thread + r * threads
            if vector < num_vectors:
                load_vector(values, r, gates, token * stride + (own + vector * length))
                for i in range(pieces):
                    load_floats(heads_here, i, heads, row + vector * length + VECTOR * i)
                for n in range(length):
                    gate = silu(values[r, n])
                    value = multiply_float32(heads_here[n // VECTOR, n % VECTOR], gate)
                    squares = multiply_add(value, value, squares)
                    values[r, n] = value
                if not is_normed:
                    store_vector(out, row + vector * length, values, r)

        if not is_normed:
            return
        total = block_sum(squares, sums)
        factor = reciprocal_root(multiply_add(total, inverse_size, eps))
        for r in range(rounds):
            vector = thread + r * threads
            if vector < num_vectors:
                for n in range(length):
                    scale = weights[r * pieces + n // VECTOR, n % VECTOR]
                    values[r, n] = multiply_float32(multiply_float32(values[r, n], factor), scale)
                store_vector(out, row + vector * length, values, r)

    return gated_row_norm
