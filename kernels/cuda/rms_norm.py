"""Root-mean-square normalisation, with the residual's addition (Zhang and Sennrich 2019).

    residual[t] += x[t]
    out[t] = residual[t] · weight / √(mean(residual[t]²) + eps)

The sum is rounded to the tensors' dtype before it is squared, as it is when read back in the next
layer. One block of threads a token; a thread keeps its vectors of 16 bytes in registers from the
first read to the last write, so that `x`, `residual`, `out` are touched once:

    row t      │ vector 0 │ vector 1 │ … │ vector P-1 │ vector P │ …
    thread          0          1              P-1          0           P threads

`x` may come in parts, [P, T, E] in float32, as products leave them whose inputs were split: they
are summed in their order, and nothing is rounded before the residual is added.

Some architectures normalise what is added (`norms_added`; Gemma 3): x[t] becomes
x[t] · added_weight / √(mean(x[t]²) + eps), in float32, before it is. Weights that are more than 1
as they are stored, and would lose that in 16 bits, are float32 (`has_float32_weights`). Where a
layer's sum is multiplied by a number (`scales_sums`; Gemma 4), so it is before it is rounded.

The weights, which the layer's other weights have driven out of the second cache, are asked for at
once, before the launch ahead has ended where this one begins early, and read with the row: behind
the barrier their way from memory would be added to the kernel's, as it was (an H200 took 1.9 to 2.3
µs for rows of 4096).

Blocks beside those of rows fetch what the next launch reads, if it is a library's product
(`fetched_weights`).

The squares are summed over a thread's vectors, over the warp by a butterfly, over the warps through
shared memory in the order of warps: the bits depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda, float32, int64, uint32

from kernels.cuda.fetched_weights import ARGUMENTS, NOTHING, FetchPlan, fetch_chunks
from kernels.cuda.instructions.conversions import CONVERSIONS, reciprocal_root
from kernels.cuda.instructions.early_launch import fetch_ahead, let_next_begin, wait_for_previous
from kernels.cuda.instructions.elements import (
    LOAD_FLOATS,
    STORE_FLOATS,
    VECTOR_LENGTHS,
)
from kernels.cuda.lanes import warp_sum
from kernels.cuda.variant import (
    STORAGE_TYPES,
    Expectation,
    Local,
    Pointer,
    Scalar,
    require_multiple,
    require_one_of,
)

MAX_THREADS = 512
MAX_HIDDEN_SIZE = 16384
PARTS = (2, 4)
"""Of `x`, where it comes in parts."""


@dataclass(frozen=True, slots=True)
class RmsNormVariant:
    """The compile-time parameters: `dtype` of all tensors, `hidden_size` E of a row.

    `adds_residual` false leaves the addition out (the first layer): `x` is normalised.
    `num_parts`: of `x`, where it is added; 0: it is one of the tensors, of their dtype.
    `norms_added`: `x` is normalised before it is added. `has_float32_weights`: the weights have
    not the tensors' dtype. `scales_sums`: what becomes of the residual is multiplied by a factor.
    Raises UnsupportedVariantError for what the kernel is not written for.
    """

    dtype: str
    hidden_size: int
    adds_residual: bool = True
    num_parts: int = 0
    norms_added: bool = False
    has_float32_weights: bool = False
    scales_sums: bool = False

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        if self.num_parts:
            require_one_of("num_parts", PARTS if self.adds_residual else (), self.num_parts)
        if self.norms_added or self.scales_sums:
            require_one_of("adds_residual", (True,), self.adds_residual)
        length = VECTOR_LENGTHS[self.dtype]
        require_multiple("hidden_size", length, self.hidden_size, MAX_HIDDEN_SIZE)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        added = "_normed" * self.norms_added + "_scaled" * self.scales_sums
        added += f"{self.num_parts or ''}"
        suffix = f"_add{added}" if self.adds_residual else ""
        weights = "_float32_weights" * self.has_float32_weights
        return f"rms_norm{suffix}_{self.dtype}_e{self.hidden_size}{weights}"

    @property
    def weight_dtype(self) -> str:
        """The dtype of the weights."""
        return "float32" if self.has_float32_weights else self.dtype

    @property
    def num_vectors(self) -> int:
        """16-byte vectors of a row."""
        return self.hidden_size // VECTOR_LENGTHS[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block: one vector each if that is enough, whole warps."""
        return min(MAX_THREADS, -(-self.num_vectors // 32) * 32)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        element = STORAGE_TYPES[self.dtype] + "*"
        x = "float32*" if self.num_parts else element
        weight = STORAGE_TYPES[self.weight_dtype] + "*"
        return (element, element, x, weight, weight, "float32", "float32", element, *ARGUMENTS)

    @property
    def expectation(self) -> Expectation:
        """A thread holds up to eight vectors of float32 at the largest size, and parts under way.

        A block of 512 threads needs no more than 128 to be launched; what it has in flight counts.
        """
        registers = 128 if self.norms_added else 120 if self.num_parts else 96
        return Expectation(registers, ("LDG.128", "STG.128", "SHFL"), begins_early=True)

    def grid(self, num_tokens: int, fetched: FetchPlan = NOTHING) -> tuple[int, int, int]:
        """Return the launch grid. `fetched`: of the next product's weights."""
        return (num_tokens, 1 + fetched.num_columns(num_tokens), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_rms_norm(self)


def variants(*, every: bool) -> list[RmsNormVariant]:
    """Return a spread of the variants, or the sizes of all models known to us."""
    if every:
        sizes = (576, 960, 2048, 2880, 3072, 4096, 5120, 8192, 16384)
        return (
            [
                RmsNormVariant(dtype, size, adds)
                for dtype in STORAGE_TYPES
                for size in sizes
                for adds in (True, False)
            ]
            + [
                RmsNormVariant(dtype, size, num_parts=parts)
                for dtype in ("float16", "bfloat16")
                for size in sizes
                for parts in PARTS
            ]
            + [one for size in (640, 1152, 2560, 3840, 5376) for one in _of_outputs(size, True)]
            + [one for size in (1536, 2560, 2816, 5376) for one in _of_outputs(size, False)]
            + [
                RmsNormVariant(dtype, 256, adds, norms_added=adds, scales_sums=adds)
                for dtype in STORAGE_TYPES
                for adds in (False, True)
            ]
        )
    return [
        RmsNormVariant("bfloat16", 576),
        RmsNormVariant("float16", 4096, adds_residual=False),
        RmsNormVariant("float32", 4096),
        RmsNormVariant("bfloat16", 4096, num_parts=PARTS[-1]),
        RmsNormVariant("bfloat16", 1152, True, 0, True, True),
        RmsNormVariant("bfloat16", 1536, norms_added=True, scales_sums=True),
    ]


def _of_outputs(size: int, has_float32_weights: bool) -> list[RmsNormVariant]:
    """Return those of models that normalise what they add: Gemma 3's, or Gemma 4's that scale."""
    return [
        RmsNormVariant(dtype, size, adds, parts, adds, has_float32_weights, scales)
        for dtype in STORAGE_TYPES
        for adds, scales in ((False, False), (True, False), (True, True))
        for parts in ((0, *PARTS) if adds and dtype != "float32" else (0,))
        if not (scales and has_float32_weights)
    ]


def make_rms_norm(variant: RmsNormVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    hidden_size, num_vectors, threads = variant.hidden_size, variant.num_vectors, variant.threads
    adds_residual = variant.adds_residual
    length = VECTOR_LENGTHS[variant.dtype]
    rounds = -(-num_vectors // threads)  # vectors of a thread
    num_warps = threads // 32
    load_floats, store_floats = LOAD_FLOATS[variant.dtype], STORE_FLOATS[variant.dtype]
    load_weight = LOAD_FLOATS[variant.weight_dtype]
    weight_length = VECTOR_LENGTHS[variant.weight_dtype]
    pieces = length // weight_length  # of the weights of a vector
    weight_bytes = 16 * num_vectors * pieces
    norms_added, scales_sums = variant.norms_added, variant.scales_sums
    weights_shape = (rounds * pieces, weight_length)
    other_rounds = rounds if norms_added else 1  # kept while x is normalised
    num_parts, part_length = variant.num_parts, VECTOR_LENGTHS["float32"]
    load_part = LOAD_FLOATS["float32"]
    to_float32, from_float32 = CONVERSIONS[variant.dtype]

    @cuda.jit(device=True, inline="always")
    def load_weights(weights: Local, r: Scalar, weight: Pointer, first: Scalar) -> None:
        """weights[r · pieces + i] = those of a piece of the vector that begins at `first`."""
        for i in range(pieces):
            load_weight(weights, r * pieces + i, weight, first + i * weight_length)

    @cuda.jit(device=True, inline="always")
    def load_x(values: Local, r: Scalar, part: Local, x: Pointer, first: Scalar) -> None:
        """values[r] = the vector that begins at `first`, of all parts."""
        if num_parts == 0:
            load_floats(values, r, x, first)
        else:
            part_size = int64(cuda.gridDim.x) * hidden_size
            for i in range(length):
                values[r, i] = float32(0)
            for p in range(num_parts):
                for q in range(length // part_length):
                    load_part(part, 0, x, p * part_size + first + q * part_length)
                    for i in range(part_length):
                        values[r, q * part_length + i] += part[0, i]

    @cuda.jit(device=True, inline="always")
    def add(
        values: Local,
        r: Scalar,
        residual: Pointer,
        others: Local,
        o: Scalar,
        at: Scalar,
        sums_factor: Scalar,
    ) -> None:
        """Add what was there, others[o], to values[r], and put the rounded sum there."""
        for i in range(length):
            total = values[r, i] + others[o, i]
            if scales_sums:
                total = total * sums_factor
            values[r, i] = to_float32(from_float32(total))
        store_floats(residual, at, values, r)

    @cuda.jit(device=True, inline="always")
    def scale(values: Local, r: Scalar, factor: Scalar, weights: Local) -> None:
        """Multiply values[r] by the row's factor and by the vector's weights."""
        for i in range(length):
            own = weights[r * pieces + i // weight_length, i % weight_length]
            values[r, i] = values[r, i] * factor * own

    @cuda.jit(device=True, inline="always")
    def factor_of(squares: Scalar, sums: Pointer, eps: Scalar) -> Scalar:
        """Return what a row is multiplied by; `squares`: of this thread's share of it.

        `sums`: shared, one of each warp, of this row alone.
        """
        squares = warp_sum(squares)
        if cuda.threadIdx.x % 32 == 0:
            sums[cuda.threadIdx.x // 32] = squares
        cuda.syncthreads()
        total = float32(0)
        for warp in range(num_warps):
            total += sums[warp]
        return reciprocal_root(total / float32(hidden_size) + eps)

    def rms_norm(
        out: Pointer,
        residual: Pointer,
        x: Pointer,
        weight: Pointer,
        added_weight: Pointer,
        eps: Scalar,
        sums_factor: Scalar,
        next_weights: Pointer,
        num_chunks: Scalar,
        chunk_pitch: Scalar,
        chunk_bytes: Scalar,
    ) -> None:
        """Normalise row blockIdx.x.

        `out`, `residual`, `x`: [T, E], three different arrays, `x` perhaps [P, T, E] in float32;
        `residual` is updated, or not touched at all where the variant adds none. `weight`: [E];
        `added_weight`: [E], of x where that is normalised, not touched elsewhere. `sums_factor`: of
        the sums where they are scaled, not looked at elsewhere. `next_weights` and what follows: as
        in `FetchPlan`.
        """
        let_next_begin()
        if cuda.blockIdx.y > 0:
            block = (cuda.blockIdx.y - 1) * cuda.gridDim.x + cuda.blockIdx.x
            num_blocks = (cuda.gridDim.y - 1) * cuda.gridDim.x
            fetch_chunks(next_weights, num_chunks, chunk_pitch, chunk_bytes, block, num_blocks)
        elif cuda.threadIdx.x == 0:
            fetch_ahead(weight, 0, uint32(weight_bytes))
            if norms_added:
                fetch_ahead(added_weight, 0, uint32(weight_bytes))
        wait_for_previous()
        if cuda.blockIdx.y > 0:
            return
        row = int64(cuda.blockIdx.x) * hidden_size
        thread = cuda.threadIdx.x
        values = cuda.local.array((rounds, length), float32)
        weights = cuda.local.array(weights_shape, float32)
        added_weights = cuda.local.array(weights_shape, float32)
        others = cuda.local.array((other_rounds, length), float32)
        part = cuda.local.array((1, part_length), float32)
        sums = cuda.shared.array(num_warps, float32)
        added_sums = cuda.shared.array(num_warps, float32)
        squares = float32(0)
        for r in range(rounds):
            vector = thread + r * threads
            if vector < num_vectors:
                at = row + vector * length
                load_weights(weights, r, weight, vector * length)
                load_x(values, r, part, x, at)
                if norms_added:
                    load_weights(added_weights, r, added_weight, vector * length)
                    load_floats(others, r, residual, at)
                elif adds_residual:
                    load_floats(others, 0, residual, at)
                    add(values, r, residual, others, 0, at, sums_factor)
                for i in range(length):
                    squares += values[r, i] * values[r, i]

        if norms_added:
            factor = factor_of(squares, added_sums, eps)
            squares = float32(0)
            for r in range(rounds):
                vector = thread + r * threads
                if vector < num_vectors:
                    scale(values, r, factor, added_weights)
                    add(values, r, residual, others, r, row + vector * length, sums_factor)
                    for i in range(length):
                        squares += values[r, i] * values[r, i]

        factor = factor_of(squares, sums, eps)
        for r in range(rounds):
            vector = thread + r * threads
            if vector < num_vectors:
                scale(values, r, factor, weights)
                store_floats(out, row + vector * length, values, r)

    return rms_norm
